"""Mechanism events to (ε, δ), by Opacus' accountants.

The guarantee is for adding or removing one unit, for the Poisson-subsampled
Gaussian mechanism. PRV (Gopi et al. 2021, arXiv:2106.02848) gives the figure;
RDP, always an upper bound, stands in where PRV fails numerically. `gdp` is never
used: it reports less than what is spent.
"""

from __future__ import annotations

import itertools
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
_RDP_ORDERS = (1.25, 1.5, 1.75, *range(2, 33), 40, 48, 64, 96, 128, 256, 512)
"""Any orders give an upper bound; whole ones are quick, the large ones serve small ε."""
_PRV_UP_TO_EPSILON = 100.0
"""RDP's figure stands above this: PRV's grid grows with ε, and no budget is there."""

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
    history = merged(events)
    return _epsilon(history, delta) if history else 0.0


@lru_cache(maxsize=4096)
def _epsilon(history: Events, delta: float) -> float:
    upper = _rdp_epsilon(history, delta)
    if not upper <= _PRV_UP_TO_EPSILON:
        return upper
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
        return float(accountant.get_epsilon(delta=delta, alphas=_RDP_ORDERS))


def merged(events: Iterable[PrivateSteps]) -> Events:
    """The steps of equal noise and rate added up, sorted: what an accountant needs to know."""
    steps: Counter[tuple[float, float]] = Counter()
    for event in events:
        steps[event.noise_multiplier, event.sampling_rate] += event.steps
    return tuple((sigma, rate, count) for (sigma, rate), count in sorted(steps.items()))


@lru_cache(maxsize=256)
def noise_multiplier_for(
    *, target_epsilon: float, delta: float, sampling_rate: float, steps: int, besides: Events = ()
) -> float:
    """The smallest σ (a multiple of 0.004) whose `steps` steps stay within `target_epsilon`.

    Args:
        besides: other mechanisms that spend from the same budget, all their steps.

    Raises:
        PrivacyError: no noise is enough, or the numbers mean nothing.
    """
    if target_epsilon <= 0 or not 0 < delta < 1:
        raise PrivacyError(f"epsilon {target_epsilon} must be positive and delta {delta} within (0, 1)")

    others = [PrivateSteps(*event) for event in besides]

    def spending(account: Callable[[Events, float], float]) -> Callable[[int], float]:
        return lambda k: account(merged([PrivateSteps(k * _SIGMA_PRECISION, sampling_rate, steps), *others]), delta)

    by_rdp = spending(_rdp_epsilon)
    high = round(0.5 / _SIGMA_PRECISION)
    while by_rdp(high) > target_epsilon:
        high *= 2
        if high * _SIGMA_PRECISION > _LARGEST_SIGMA:
            beside = f" beside {besides}" if besides else ""
            raise PrivacyError(
                f"no noise up to {_LARGEST_SIGMA:.0f} is accounted at epsilon {target_epsilon} "
                f"in {steps} steps{beside}; raise epsilon or plan fewer rounds"
            )
    enough = _smallest(by_rdp, high, target_epsilon)
    return _smallest(spending(_epsilon), enough, target_epsilon) * _SIGMA_PRECISION


def _smallest(spent: Callable[[int], float], high: int, target: float) -> int:
    """The smallest k in 1..high with spent(k) <= target, where spent falls and `high` is enough.

    False position on ε² over 1/σ², nearly a line also beside other mechanisms: each figure is costly.
    Every third step halves, so that a bend costs at most three times what bisection does.
    """
    low, at_low, at_high = 0, math.inf, spent(high)
    for step in itertools.count():
        if high - low <= 1:
            return high
        if step % 3 == 2 or (low and not math.isfinite(at_low)):
            k = (low + high) // 2
        elif low == 0:
            k = math.ceil(0.99 * high * at_high / target)
        else:
            share = (at_low**2 - target**2) / (at_low**2 - at_high**2)
            k = math.ceil(((1 - share) / low**2 + share / high**2) ** -0.5)
        k = min(max(k, low + 1), high - 1)
        found = spent(k)
        if found <= target:
            high, at_high = k, found
        else:
            low, at_low = k, found
    raise AssertionError
