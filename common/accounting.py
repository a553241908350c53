"""Mechanism events to (ε, δ), by Opacus' accountants.

The guarantee is for adding or removing one unit, for the Poisson-subsampled
Gaussian mechanism. PRV (Gopi et al. 2021, arXiv:2106.02848) gives the figure;
RDP, always an upper bound, stands in where PRV fails numerically. `gdp` is never
used: it reports less than what is spent.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from opacus.accountants import PRVAccountant, RDPAccountant

from common.errors import PrivacyError

_SIGMA_PRECISION = 0.004
_LARGEST_SIGMA = 1e4
_PRV_NEEDS_AT_LEAST = 0.75
"""PRV's noise was never below this share of RDP's; a wrong share costs noise, not privacy."""

Events = tuple[tuple[float, float, int], ...]
"""(noise multiplier, sampling rate, steps), merged and sorted."""


@dataclass(frozen=True)
class PrivateSteps:
    """One mechanism event: `steps` noisy sums at noise σ·C, each unit in a batch with rate q."""

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise PrivacyError(f"noise multiplier {self.noise_multiplier} must be positive")
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(f"sampling rate {self.sampling_rate} must be within (0, 1]")
        if self.steps < 1:
            raise PrivacyError(f"steps {self.steps} must be at least 1")


def epsilon(events: Iterable[PrivateSteps], *, delta: float) -> float:
    """ε of all events together at `delta`; 0 for none."""
    merged: Counter[tuple[float, float]] = Counter()
    for event in events:
        merged[event.noise_multiplier, event.sampling_rate] += event.steps
    history = tuple((sigma, rate, steps) for (sigma, rate), steps in sorted(merged.items()))
    return _epsilon(history, delta) if history else 0.0


@lru_cache(maxsize=4096)
def _epsilon(history: Events, delta: float) -> float:
    upper = _rdp_epsilon(history, delta)
    accountant = PRVAccountant()
    accountant.history = list(history)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tight = float(accountant.get_epsilon(delta=delta))
    except (ValueError, OverflowError, ArithmeticError, RuntimeError, MemoryError):
        return upper
    return min(tight, upper) if math.isfinite(tight) and tight >= 0 else upper


def _rdp_epsilon(history: Events, delta: float) -> float:
    accountant = RDPAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta=delta))


@lru_cache(maxsize=256)
def noise_multiplier_for(*, target_epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """The smallest σ (to 0.004, rounded up) whose `steps` steps stay within `target_epsilon`."""
    if target_epsilon <= 0 or not 0 < delta < 1:
        raise PrivacyError(f"epsilon {target_epsilon} must be positive and delta {delta} within (0, 1)")

    def smallest(spent: Callable[[Events, float], float], low: float, high: float) -> float:
        while high - low > _SIGMA_PRECISION:
            middle = (low + high) / 2
            over = spent(((middle, sampling_rate, steps),), delta) > target_epsilon
            low, high = (middle, high) if over else (low, middle)
        return math.ceil(high / _SIGMA_PRECISION) * _SIGMA_PRECISION

    high = 0.5
    while _rdp_epsilon(((high, sampling_rate, steps),), delta) > target_epsilon:
        high *= 2
        if high > _LARGEST_SIGMA:
            raise PrivacyError(
                f"no noise up to {_LARGEST_SIGMA:.0f} is accounted at epsilon {target_epsilon} in {steps} steps; "
                "raise epsilon or plan fewer rounds"
            )
    by_rdp = smallest(_rdp_epsilon, 0.0 if high == 0.5 else high / 2, high)
    return smallest(_epsilon, _PRV_NEEDS_AT_LEAST * by_rdp, by_rdp)
