"""Which answered requests become training data; the decision and its reason are recorded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Decision:
    """Whether a request is selected, and why."""

    accepted: bool
    reason: str
    labels: tuple[str, ...] = ()


class SelectionStrategy(Protocol):
    """Decides after the answer; a request that is not selected leaves no trace."""

    def decide(self) -> Decision: ...


class SamplingRate:
    """Selects each request independently with a fixed probability.

    Raises:
        ValueError: the rate is outside [0, 1].
    """

    def __init__(self, rate: float) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"sampling rate {rate} must be within [0, 1]")
        self.rate = rate

    def decide(self) -> Decision:
        if random.random() < self.rate:
            return Decision(True, "sampling-rate", ("sampled",))
        return Decision(False, "sampling-rate", ("not-sampled",))
