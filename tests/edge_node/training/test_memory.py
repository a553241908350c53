"""What a pass is allowed to hold is what it holds, measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.adapter import Adapter
from common.inference.model_folder import LlamaDimensions, ModelFolder
from edge_node.training.batch import Term
from edge_node.training.lora_model import LoraModel
from edge_node.training.memory import bytes_per_token, free_bytes, pass_limit
from edge_node.training.objectives import OBJECTIVES
from edge_node.training.step_time import synthetic_terms
from edge_node.training.unit_gradients import FlatGradients
from tests.conftest import SHAPE, changed
from tests.edge_node.training.examples import losses_of

SMOLLM2 = LlamaDimensions(576, 1536, 30, 9, 3, 64, 49152, 8192, 1e-5, 1e5)
"""A 135 M model."""


def peak_bytes(lora: LoraModel, terms: list[Term]) -> int:
    """The most that one forward and backward pass holds at once, without weights and without the gradients it gives."""
    losses, engine = losses_of(lora, "rft", threshold=-1.0), FlatGradients(lora.peft_model)
    list(engine.gradients(terms, len(terms), losses))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        list(engine.gradients(terms, len(terms), losses))
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes)) - len(terms) * engine.dimension * 4


@pytest.mark.parametrize("phase", ["A", "B"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_holds_no_more_than_is_said_of_it_and_not_much_less(
    model: ModelFolder, start: Adapter, checkpointing: bool, phase: str
) -> None:
    """The figure is fitted to a larger model and rounded up."""
    adapter = changed(start, seed=1)
    lora = LoraModel(model, SHAPE, checkpointing=checkpointing)
    lora.start(adapter, adapter.names(phase))
    terms = synthetic_terms(OBJECTIVES["rft"], 8, prompt_tokens=1, completion_tokens=63)
    said = bytes_per_token(model.dimensions, value_bytes=4, checkpointing=checkpointing) * 8 * 64
    assert said / 4 < peak_bytes(lora, terms) <= said


def test_what_is_kept_grows_with_the_model_and_shrinks_with_checkpointing() -> None:
    def said(value_bytes: int = 4, *, checkpointing: bool = False, of: LlamaDimensions = SMOLLM2) -> float:
        return bytes_per_token(of, value_bytes=value_bytes, checkpointing=checkpointing)

    for larger in (
        replace(SMOLLM2, hidden=1152),
        replace(SMOLLM2, intermediate=3072),
        replace(SMOLLM2, layers=60),
        replace(SMOLLM2, vocabulary=98304),
    ):
        assert said(of=larger) > said()
        assert said(checkpointing=True, of=larger) > said(checkpointing=True)
    assert said(checkpointing=True) < said() / 2
    logits = 12.0 * SMOLLM2.vocabulary  # float32 whatever the base is
    assert said(2) - logits == pytest.approx((said(4) - logits) / 2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_takes_at_most_half_of_what_is_free(checkpointing: bool) -> None:
    per_token = bytes_per_token(SMOLLM2, value_bytes=2, checkpointing=checkpointing)
    for free in (2 * 10**8, 10**9, 10**11):
        limit = pass_limit(free, SMOLLM2, value_bytes=2, checkpointing=checkpointing)
        assert limit.rows == 64
        assert limit.tokens * per_token <= free / 2 < (limit.tokens + 1) * per_token


def test_a_machine_without_free_memory_still_tries_one_answer_at_a_time() -> None:
    limit = pass_limit(0, SMOLLM2)
    assert limit.tokens == 1
    terms = synthetic_terms(OBJECTIVES["dpo"], 3, prompt_tokens=4, completion_tokens=4)
    assert [len(part) for part in limit.passes(terms)] == [1, 1, 1]


def test_free_memory_is_the_machines() -> None:
    free = free_bytes(torch.device("cpu"))
    assert 0 < free <= psutil.virtual_memory().total
