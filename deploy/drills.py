"""Two deliberately bad versions, to see the canary catch what the gates were told to let through."""

from __future__ import annotations

import numpy as np

from common.adapter import Adapter
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder
from common.tasks import math as task
from deploy.fine_tuning import answered, fine_tuned
from edge_node.training.batch import Term
from edge_node.training.lora_model import LoraModel

_WORSE_STEPS = 16


def crashing(stable: Adapter) -> Adapter:
    """Finite weights whose product overflows: every answer fails as not finite."""
    first = next(name for name in stable.tensors if name.endswith("lora_A.weight"))
    tensors = dict(stable.tensors)
    for name in (first, first.replace("lora_A", "lora_B")):
        tensors[name] = np.full_like(tensors[name], 1e25)
    return Adapter(stable.shape, tensors)


def fluent_but_worse(stable: Adapter, model: ModelFolder) -> Adapter:
    """Fine-tuned on public problems to write well-formed answers whose results are all wrong."""
    tokenizer = ChatTokenizer(model)
    names = stable.names("B")
    terms = (_wrong(p, tokenizer) for p in task.problems(task.Distribution(), task.Split.TRAIN, seed=0))
    lora = LoraModel(model, stable.shape)
    made = fine_tuned(lora, stable, names, terms, steps=_WORSE_STEPS, pad_id=tokenizer.pad_id)
    return Adapter(stable.shape, {**stable.tensors, **made})


def _wrong(problem: task.Problem, tokenizer: ChatTokenizer) -> Term:
    """A well-formed answer in which every result is wrong."""
    parts = [step.split("=") for step in problem.steps]
    steps = " ; ".join(f"{left}={int(result) + 1}" for left, result in parts)
    return answered(problem.prompt, f"{steps}\nAnswer: {problem.answer + 10}", tokenizer)
