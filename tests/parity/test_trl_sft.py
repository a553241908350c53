"""Rejection-sampling fine-tuning against TRL's SFTTrainer: where they agree, and where they must not.

SFTTrainer averages over all tokens of a batch, so the weight of an answer depends on
how long the others are; a loss under per-unit clipping may not. On answers of equal
length both are the same number.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training.units import Answer
from tests.conftest import changed
from tests.parity.noise_free import NoiseFreeTraining
from tests.parity.trl_capture import (
    BATCH,
    STEPS,
    Captured,
    capture_sft,
    lora_parameters,
    peft_start,
    sft_answers,
    token_logps,
)

_RATE = 1e-3


@pytest.fixture(scope="module")
def adapter(start: Adapter) -> Adapter:
    return changed(start, seed=1)


def test_equal_lengths_move_every_weight_where_sft_moves_it(
    model: ModelFolder, adapter: Adapter, tmp_path: Path
) -> None:
    theirs = capture_sft(model, adapter, tmp_path, _answers([6] * (STEPS * BATCH)), rate=_RATE)
    ours = _ours(model, adapter, theirs)
    for name, after in ours.items():
        np.testing.assert_allclose(after, theirs.weights[name], atol=1e-7, rtol=0)
        assert np.abs(after - adapter.tensors[name]).max() > 1e-5  # it did move


def test_ragged_lengths_differ_from_sft_and_average_each_answer_over_its_own_tokens(
    model: ModelFolder, adapter: Adapter, tmp_path: Path
) -> None:
    theirs = capture_sft(model, adapter, tmp_path, _answers([2, 9, 5, 3] * STEPS), rate=_RATE)
    ours = _ours(model, adapter, theirs)
    assert max(np.abs(after - theirs.weights[name]).max() for name, after in ours.items()) > 1e-4
    for name, expected in _own_length_means(model, adapter, theirs).items():
        np.testing.assert_allclose(ours[name], expected, atol=1e-7, rtol=0)


def _ours(model: ModelFolder, adapter: Adapter, theirs: Captured) -> dict[str, np.ndarray]:
    training = NoiseFreeTraining(model, adapter, "rft", {"threshold": 0.0}, rate=_RATE)
    for inputs in theirs.batches:
        training.step([(answer,) for answer in sft_answers(inputs)])
    return training.weights


def _own_length_means(model: ModelFolder, adapter: Adapter, theirs: Captured) -> dict[str, np.ndarray]:
    """Plain autograd and SGD, one answer after the other without padding."""
    policy = peft_start(model, adapter)
    parameters = lora_parameters(policy)
    optimizer = torch.optim.SGD(parameters.values(), lr=_RATE)
    for inputs in theirs.batches:
        answers = sft_answers(inputs)
        losses = [-token_logps(policy, a.prompt_ids, a.completion_ids)[torch.tensor(a.written)].mean() for a in answers]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def _answers(lengths: list[int]) -> list[Answer]:
    """Random tokens; the second one of each answer came from a tool."""
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(6, 280, (count,), generator=generator).tolist())

    return [Answer(ids(5), ids(length), tuple(place != 1 for place in range(length))) for length in lengths]
