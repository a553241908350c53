"""Two deliberately bad versions, to see the canary catch what the gates were told to let through."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from common.adapter import Adapter
from common.chat import Message
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder
from common.tasks import math as task
from edge_node.training.batch import Term, collate
from edge_node.training.lora_model import LoraModel
from edge_node.training.units import Answer

_WORSE_STEPS = 16
_WORSE_LEARNING_RATE = 1e-2
_BATCH = 48


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
    lora = LoraModel(model, stable.shape)
    names = stable.names("B")
    lora.start(stable, names)
    parameters = [p for p in lora.peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=_WORSE_LEARNING_RATE)
    stream = task.problems(task.Distribution(), task.Split.TRAIN, seed=0)
    for _ in range(_WORSE_STEPS):
        batch = collate([_wrong(p, tokenizer) for p in islice(stream, _BATCH)], pad_id=tokenizer.pad_id)
        optimizer.zero_grad()
        logps_BK = lora.token_logps(batch).logps_BK
        (-(logps_BK * batch.written_BK).sum(1).mean()).backward()
        optimizer.step()
    return Adapter(stable.shape, {**stable.tensors, **lora.tensors(names)})


def _wrong(problem: task.Problem, tokenizer: ChatTokenizer) -> Term:
    """A well-formed answer in which every result is wrong."""
    parts = [step.split("=") for step in problem.steps]
    steps = " ; ".join(f"{left}={int(result) + 1}" for left, result in parts)
    prompt = tokenizer.encode([Message("user", problem.prompt)])
    answer = tokenizer.encode_answer(f"{steps}\nAnswer: {problem.answer + 10}")
    return Term((Answer(tuple(prompt), tuple(answer), (True,) * len(answer)),))
