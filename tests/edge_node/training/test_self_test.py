"""The self-test passes where the guarantee holds, and each of its checks sees the fault it is there for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft.utils
import pytest
import torch

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training import self_test as module
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.objectives import OBJECTIVES
from edge_node.training.private_step import ClippedSum
from edge_node.training.self_test import Check, self_test
from edge_node.training.unit_gradients import FlatGradients
from tests.conftest import SHAPE, changed

NAMES = (
    "per-unit gradients",
    "noise off = plain SGD",
    "sensitivity",
    "noise of an empty batch",
    "equal noise under one seed",
    "save and reload",
)
TOLERANCE = 1e-4

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def lora(model: ModelFolder) -> LoraModel:
    return LoraModel(model, SHAPE)


@pytest.fixture
def in_this_process(monkeypatch: Patch) -> None:
    """Without the two processes of `_noise_is_secret`, which take seconds and have a test of their own."""
    passed = Check("equal noise under one seed", 0.0, 0.0, "")
    monkeypatch.setattr(module, "_noise_is_secret", lambda: passed)


def failed(checks: list[Check]) -> list[str]:
    assert tuple(check.name for check in checks) == NAMES
    return [check.name for check in checks if not check.passed]


def test_the_whole_test_passes_and_gives_a_figure_for_each_check(lora: LoraModel, start: Adapter) -> None:
    checks = self_test(lora, start, objective="dpo", tolerance=TOLERANCE)
    assert failed(checks) == []
    figures = {check.name: check.figure for check in checks}
    assert 0.99 < figures["sensitivity"] <= 1.0  # the bound is reached and not crossed
    assert 0 < figures["noise off = plain SGD"] < TOLERANCE
    assert all(check.meaning for check in checks)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_passes_on_both_factors(lora: LoraModel, start: Adapter, objective: str) -> None:
    for adapter in (start, changed(start, seed=1)):
        assert failed(self_test(lora, adapter, objective=objective, tolerance=TOLERANCE)) == []


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_base_of_lower_precision_passes_within_its_own_tolerance(
    model: ModelFolder, start: Adapter, precision: str
) -> None:
    """With the engine such a base is trained with: a site without a fault must not be refused.

    All objectives pass; two are tried here, because processors without these types emulate them slowly.
    """
    from edge_node.training.site_training import _TOLERANCE

    lora = LoraModel(model, SHAPE, precision=precision)  # type: ignore[arg-type]
    for objective in ("dpo", "ppo"):
        checks = self_test(lora, start, objective=objective, engine="one-unit", tolerance=_TOLERANCE[precision])
        assert failed(checks) == [], (objective, checks)


@pytest.mark.usefixtures("in_this_process")
def test_the_model_is_left_with_the_adapter_it_was_given(lora: LoraModel, start: Adapter) -> None:
    for adapter in (start, changed(start, seed=1)):
        self_test(lora, adapter, objective="dpo", tolerance=TOLERANCE)
        for name, tensor in lora.tensors(tuple(adapter.tensors)).items():
            np.testing.assert_array_equal(tensor, adapter.tensors[name])
        assert not any(p.requires_grad for p in lora.peft_model.parameters())


def wrong_gradients(monkeypatch: Patch) -> None:
    real = FlatGradients._accumulate
    monkeypatch.setattr(FlatGradients, "_accumulate", lambda self, index, x, grad: real(self, index, x * 1.001, grad))


def units_mixed_up(monkeypatch: Patch) -> None:
    """The sum is right; one unit's gradient is clipped as if part of it were another's."""
    real = FlatGradients._group

    def mixed(self: FlatGradients, *arguments: Any) -> torch.Tensor:
        gradients_UD = real(self, *arguments)
        moved_D = gradients_UD[0] / 2
        gradients_UD[0] -= moved_D
        gradients_UD[1] += moved_D
        return gradients_UD

    monkeypatch.setattr(FlatGradients, "_group", mixed)


def last_unit_lost(monkeypatch: Patch) -> None:
    real = ClippedSum.add
    monkeypatch.setattr(ClippedSum, "add", lambda self, gradients_UD: real(self, gradients_UD[:-1]))


def clip_too_wide(monkeypatch: Patch) -> None:
    real = ClippedSum.__init__

    def wide(self: ClippedSum, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        self._rounded_clip *= 1.01

    monkeypatch.setattr(ClippedSum, "__init__", wide)


def what_is_not_finite_is_kept(monkeypatch: Patch) -> None:
    """Huge instead of zero, as a clip by min(1, C/norm) with a norm that is not a number would leave it."""
    real = ClippedSum.add

    def add(self: ClippedSum, gradients_UD: torch.Tensor) -> None:
        real(self, gradients_UD)
        if not bool(torch.isfinite(gradients_UD).all()):
            self._sum_D += 1 << 40

    monkeypatch.setattr(ClippedSum, "add", add)


def too_little_noise(monkeypatch: Patch) -> None:
    real = SecureRandom.normal
    monkeypatch.setattr(SecureRandom, "normal", lambda self, count: real(self, count) * 0.97)


def no_noise(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SecureRandom, "normal", lambda self, count: np.zeros(count))


def corrupted_on_loading(monkeypatch: Patch) -> None:
    real = peft.utils.load_peft_weights

    def load(*arguments: Any, **named: Any) -> dict[str, torch.Tensor]:
        weights = real(*arguments, **named)
        return {name: weight * 0.99 for name, weight in weights.items()}

    monkeypatch.setattr(peft.utils, "load_peft_weights", load)


def nothing_loaded(monkeypatch: Patch) -> None:
    """As with names that do not match: PEFT says nothing."""
    monkeypatch.setattr(peft.utils, "load_peft_weights", lambda *_, **__: {})


FAULTS: dict[Callable[[Patch], None], str] = {
    wrong_gradients: "per-unit gradients",
    units_mixed_up: "per-unit gradients",
    last_unit_lost: "noise off = plain SGD",
    clip_too_wide: "sensitivity",
    what_is_not_finite_is_kept: "sensitivity",
    too_little_noise: "noise of an empty batch",
    no_noise: "noise of an empty batch",
    corrupted_on_loading: "save and reload",
    nothing_loaded: "save and reload",
}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_by_the_check_that_is_there_for_it(
    lora: LoraModel, start: Adapter, monkeypatch: Patch, fault: Callable[[Patch], None]
) -> None:
    fault(monkeypatch)
    assert FAULTS[fault] in failed(self_test(lora, changed(start, seed=1), objective="dpo", tolerance=TOLERANCE))


def test_noise_that_a_seed_reproduces_is_seen(tmp_path: Path, monkeypatch: Patch) -> None:
    """An operating system whose randomness repeats, as in a cloned virtual machine."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.urandom = bytes\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert not module._noise_is_secret().passed


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), 1.1])
def test_a_figure_beyond_its_limit_or_that_is_no_number_fails(figure: float) -> None:
    assert not Check("x", figure, 1.0, "").passed
    assert Check("x", 1.0, 1.0, "").passed
