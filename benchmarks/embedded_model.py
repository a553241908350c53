"""How well the embedded model does on held-out problems, sampled and greedy.

python benchmarks/embedded_model.py
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from common.adapter import initial_adapter
from common.chat import Message
from common.inference.batching import Batcher, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine
from common.inference.model_folder import EMBEDDED, open_model
from common.inference.sampling import SamplingParameters
from common.tasks import math as task
from edge_node.config import LoraSettings

PROBLEMS = 1000


def main() -> None:
    model = open_model(EMBEDDED)
    tokenizer = ChatTokenizer(model)
    engine = Engine(model, slots=64, context_tokens=96, threads=2)
    adapter = engine.load(initial_adapter(model.module_shapes(), LoraSettings().shape, seed=0))
    batcher = Batcher(engine)
    problems = list(islice(task.problems(task.Distribution(), task.Split.HELD_OUT, seed=1), PROBLEMS))
    print(f"{PROBLEMS} held-out problems")
    for name, temperature in (("sampled at temperature 1", 1.0), ("greedy", 0.0)):
        futures = [
            batcher.submit(
                GenerationRequest(
                    tokenizer.encode([Message("user", p.prompt)]), 48, SamplingParameters(temperature), seed=index
                ),
                adapter,
            )
            for index, p in enumerate(problems)
        ]
        texts = [tokenizer.decode(future.result().token_ids) for future in futures]
        scores = [task.score_answer(p, text) for p, text in zip(problems, texts, strict=True)]
        print(
            f"{name}: reward {np.mean([s.total for s in scores]):.3f}, "
            f"right answer {np.mean([s.answer for s in scores]):.1%}, "
            f"fully right {np.mean([s.total > 0.999 for s in scores]):.1%}"
        )
    batcher.close()


if __name__ == "__main__":
    main()
