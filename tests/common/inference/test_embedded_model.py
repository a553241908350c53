"""The embedded model is as good, and as bad, as a demonstration needs."""

from __future__ import annotations

from itertools import islice

from common.adapter import Adapter
from common.chat import Message
from common.inference.batching import Batcher, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine
from common.inference.sampling import SamplingParameters
from common.tasks import math as task


def test_it_is_right_on_a_quarter_to_three_fifths_of_held_out_problems(
    engine: Engine, tokenizer: ChatTokenizer, start: Adapter
) -> None:
    problems = list(islice(task.problems(task.Distribution(), task.Split.HELD_OUT, seed=3), 400))
    batcher, adapter = Batcher(engine), engine.load(start)
    futures = [
        batcher.submit(
            GenerationRequest(tokenizer.encode([Message("user", p.prompt)]), 48, SamplingParameters(), seed=i), adapter
        )
        for i, p in enumerate(problems)
    ]
    texts = [tokenizer.decode(future.result(timeout=120).token_ids) for future in futures]
    batcher.close()
    right = sum(task.score_answer(p, text).answer for p, text in zip(problems, texts, strict=True)) / len(problems)
    assert 0.25 <= right <= 0.60
