"""Plain fine-tuning of one LoRA factor on public problems, without privacy: for drills and attackers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from common.adapter import Adapter
from common.chat import Message
from common.inference.chat_tokenizer import ChatTokenizer
from edge_node.training.batch import Term, collate
from edge_node.training.lora_model import LoraModel
from edge_node.training.units import Answer

BATCH = 48
LEARNING_RATE = 1e-2


def fine_tuned(
    lora: LoraModel,
    start: Adapter,
    names: tuple[str, ...],
    terms: Iterator[Term],
    *,
    steps: int,
    pad_id: int,
    within: float = math.inf,
) -> dict[str, np.ndarray]:
    """The named tensors after some steps of Adam on the likelihood of the terms' answers.

    Args:
        within: largest L2 norm of the change; every step is projected back to it.
    """
    lora.start(start, names)
    parameters = [p for p in lora.peft_model.parameters() if p.requires_grad]
    begun = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    for _ in range(steps):
        batch = collate(list(islice(terms, BATCH)), pad_id=pad_id)
        optimizer.zero_grad()
        logps_BK = lora.token_logps(batch).logps_BK
        (-(logps_BK * batch.written_BK).sum(1).mean()).backward()
        optimizer.step()
        _project(parameters, begun, within)
    return dict(lora.tensors(names))


@torch.no_grad()
def _project(parameters: list[torch.nn.Parameter], begun: list[torch.Tensor], within: float) -> None:
    """Shorten the change of all parameters together to an L2 norm."""
    changes = [p - before for p, before in zip(parameters, begun, strict=True)]
    norm = math.sqrt(sum(float(change.square().sum()) for change in changes))
    if norm > within:
        for p, before, change in zip(parameters, begun, changes, strict=True):
            p.copy_(before + change * (within / norm))


def answered(prompt: str, answer: str, tokenizer: ChatTokenizer) -> Term:
    """A prompt with the answer that is to become likely."""
    prompt_ids, answer_ids = tokenizer.encode([Message("user", prompt)]), tokenizer.encode_answer(answer)
    return Term((Answer(tuple(prompt_ids), tuple(answer_ids), (True,) * len(answer_ids)),))
