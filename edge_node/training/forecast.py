"""What a number of rounds would cost a site, and whether anything can be learned for it.

Pure: the caller measures the time of one unit and reads the policy. Nothing here
looks at data; the number of units is a nominal one, given by a person.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.accounting import PrivateSteps, epsilon, merged, noise_multiplier_for
from common.plan import Training

NEEDED_SNR = 200.0
"""√(steps) · q · units / σ that leaves three quarters of the gain on the embedded model's task; at 120 less than half
is left, at 60 a fifth (docs/benchmarks.md)."""

_LEAST_SIGMA = 0.05
"""Noise below this costs an epsilon of thousands, which nobody allows: it is not accounted, only refused."""

_BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Forecast:
    """Of all rounds together, unless a name says otherwise.

    Attributes:
        noise_multiplier: σ of the training steps, solved for the policy's ε.
        epsilon_of_first_round: at that noise; later rounds add less each.
        epsilon_of_all_rounds: at that noise, at most the policy's.
        epsilon_needed: what these rounds would cost with the most noise that still lets them learn.
        signal_to_noise: √(steps · rounds) · q · units / σ: the length of the summed gradients of units that
            agree, over the noise along it.
        minutes: of training on this machine.
        megabytes_up, megabytes_down: updates sent, versions fetched (10⁶ bytes).
        refusal: why it makes no sense to begin, and what would; None where it does.
    """

    noise_multiplier: float
    epsilon_of_first_round: float
    epsilon_of_all_rounds: float
    epsilon_needed: float
    signal_to_noise: float
    minutes: float
    megabytes_up: float
    megabytes_down: float
    refusal: str | None


def forecast(
    training: Training,
    *,
    rounds: int,
    units: int,
    values: int,
    adapter_values: int,
    epsilon_total: float,
    delta: float,
    seconds_per_unit: float,
    unit: str,
    beside: Sequence[PrivateSteps] = (),
    noise_multiplier: float | None = None,
) -> Forecast:
    """Forecast `rounds` rounds of one site.

    Args:
        units: how many the site expects to have in every round.
        values: D, of one update.
        adapter_values: of a whole version, which is fetched after every round.
        seconds_per_unit: one unit's gradient, measured.
        unit: what the policy protects, for the text.
        beside: mechanisms that every round runs beside the training steps.
        noise_multiplier: of a ledger in use, whose σ is fixed; solved for `epsilon_total` where there is none.

    Raises:
        PrivacyError: no noise keeps so many rounds within `epsilon_total`.
    """
    others = tuple(replace(event, steps=event.steps * rounds) for event in beside)
    schedule = _Schedule(training.sampling_rate, training.steps * rounds, others, delta)
    sigma = schedule.noise_for(epsilon_total) if noise_multiplier is None else noise_multiplier
    first = [PrivateSteps(sigma, training.sampling_rate, training.steps), *beside]
    needed = schedule.epsilon_to_learn(units)
    fixed = noise_multiplier is not None
    drowned = schedule.signal_to_noise(units, sigma) < NEEDED_SNR if fixed else needed > epsilon_total
    return Forecast(
        noise_multiplier=sigma,
        epsilon_of_first_round=epsilon(first, delta=delta),
        epsilon_of_all_rounds=schedule.epsilon(sigma),
        epsilon_needed=needed,
        signal_to_noise=schedule.signal_to_noise(units, sigma),
        minutes=schedule.steps * training.sampling_rate * units * seconds_per_unit / 60,
        megabytes_up=rounds * values * _BYTES_PER_VALUE / 1e6,
        megabytes_down=rounds * adapter_values * _BYTES_PER_VALUE / 1e6,
        refusal=_refusal(schedule, rounds, units, unit, epsilon_total) if drowned else None,
    )


@dataclass(frozen=True)
class _Schedule:
    """All training steps of all rounds, and what runs beside them."""

    rate: float
    steps: int
    others: tuple[PrivateSteps, ...]
    delta: float

    def epsilon(self, sigma: float) -> float:
        return epsilon([PrivateSteps(sigma, self.rate, self.steps), *self.others], delta=self.delta)

    def noise_for(self, epsilon_total: float) -> float:
        return noise_multiplier_for(
            target_epsilon=epsilon_total,
            delta=self.delta,
            sampling_rate=self.rate,
            steps=self.steps,
            besides=merged(self.others),
        )

    def signal_to_noise(self, units: int, sigma: float) -> float:
        return math.sqrt(self.steps) * self.rate * units / sigma

    def epsilon_to_learn(self, units: int) -> float:
        """ε at the largest noise that leaves `NEEDED_SNR`; inf where that is hardly any noise."""
        sigma = self.signal_to_noise(units, NEEDED_SNR)
        return self.epsilon(sigma) if sigma > _LEAST_SIGMA else math.inf

    def units_to_learn(self, epsilon_total: float) -> int:
        """The fewest units that can learn within `epsilon_total`."""
        high = math.ceil(NEEDED_SNR * self.noise_for(epsilon_total) / self.signal_to_noise(1, 1.0))
        width = 1
        while high > width and self.epsilon_to_learn(high - width) <= epsilon_total:
            width *= 2
        low, high = max(0, high - width), high - width // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.epsilon_to_learn(middle) <= epsilon_total else (middle, high)
        return high


def _refusal(schedule: _Schedule, rounds: int, units: int, unit: str, epsilon_total: float) -> str:
    needed, names = schedule.epsilon_to_learn(units), _plural(unit)
    over = "" if math.isfinite(needed) else "more than "
    shown = needed if math.isfinite(needed) else schedule.epsilon(_LEAST_SIGMA)
    return (
        f"{units} {names} over {rounds} rounds need epsilon {over}{math.ceil(shown * 10) / 10:g} to learn anything, "
        f"the policy allows {epsilon_total:g}; at least {schedule.units_to_learn(epsilon_total)} {names} are needed, "
        "or fewer rounds"
    )


def _plural(unit: str) -> str:
    return f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"
