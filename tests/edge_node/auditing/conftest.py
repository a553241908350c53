"""One mechanism for all checks, and the bugs that are planted into the code they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.accounting import PrivateSteps
from edge_node.auditing.mechanism import AuditedMechanism
from edge_node.training.noise import SecureRandom
from edge_node.training.private_step import ClippedSum

Plant = Callable[[], None]


@pytest.fixture(scope="session")
def mechanism() -> AuditedMechanism:
    """About what a simulation charges by default: ε near 8 in ten steps."""
    return AuditedMechanism(PrivateSteps(1.2, 0.5, 10), clip_norm=0.1, delta=1e-5)


@pytest.fixture
def noise_divided_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    right = SecureRandom.normal

    def plant(factor: float) -> None:
        monkeypatch.setattr(SecureRandom, "normal", lambda self, count: right(self, count) / factor)

    return plant


@pytest.fixture
def clip_four_times_too_wide(monkeypatch: pytest.MonkeyPatch) -> Plant:
    right = ClippedSum.__init__

    def wrong(self: ClippedSum, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self._rounded_clip *= 4

    return lambda: monkeypatch.setattr(ClippedSum, "__init__", wrong)


@pytest.fixture
def batches_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> Plant:
    def wrong(self: SecureRandom, rate: float, count: int) -> np.ndarray:
        return self.uniform(count).argsort().argsort() < round(rate * count)

    return lambda: monkeypatch.setattr(SecureRandom, "bernoulli", wrong)


@pytest.fixture
def noise_from_a_seed(monkeypatch: pytest.MonkeyPatch) -> Plant:
    return lambda: monkeypatch.setattr(SecureRandom, "normal", lambda self, count: np.random.standard_normal(count))
