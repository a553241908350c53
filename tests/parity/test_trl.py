"""Noise-free private steps against TRL's DPOTrainer on the same batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from tests.conftest import changed
from tests.parity.noise_free import NoiseFreeTraining
from tests.parity.trl_capture import capture_dpo, dpo_pairs

_BETA = 0.1


@pytest.mark.parametrize(("objective", "loss_type", "rate"), [("dpo", "sigmoid", 3e-3), ("ipo", "ipo", 1e-4)])
def test_three_steps_move_every_weight_where_trl_moves_it(
    model: ModelFolder, start: Adapter, tmp_path: Path, objective: str, loss_type: str, rate: float
) -> None:
    adapter = changed(start, seed=1)
    rows = [
        {"prompt": f"What is {a}+{b}?", "chosen": f" {a + b}", "rejected": f" {a - b} ; no"}
        for a, b in zip(range(11, 23), range(40, 52), strict=True)
    ]
    theirs = capture_dpo(model, adapter, tmp_path, rows, beta=_BETA, rate=rate, loss_type=loss_type)

    ours = NoiseFreeTraining(model, adapter, objective, {"beta": _BETA}, rate=rate)
    for inputs in theirs.batches:
        ours.step(dpo_pairs(inputs))
    for name, after in ours.weights.items():
        np.testing.assert_allclose(after, theirs.weights[name], atol=1e-7, rtol=0)
        assert np.abs(after - adapter.tensors[name]).max() > 1e-6  # it did move
