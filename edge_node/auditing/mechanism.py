"""A1 to A3: noise floor, sensitivity and sampling of the mechanism that trains.

Each bound is five standard errors of a correct mechanism, or a p-value of 1e-6:
a failure is a fault, not bad luck. Nothing here looks at ε; `one_run` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from common.accounting import PrivateSteps
from edge_node.auditing.seeds import repeated_in_another_process, repeated_in_one_process
from edge_node.auditing.statement import Check, Figure
from edge_node.training.noise import SecureRandom
from edge_node.training.private_step import ClippedSum

_STANDARD_ERRORS = 5.0
_SMALLEST_P_VALUE = 1e-6


@dataclass(frozen=True)
class AuditedMechanism:
    """Noisy clipped sums as they are charged.

    Attributes:
        event: σ, q and all steps that compose.
        clip_norm: C; every check is relative to it.
        delta: at which ε is claimed.
    """

    event: PrivateSteps
    clip_norm: float
    delta: float

    @property
    def scale(self) -> float:
        """Standard deviation of the noise on one coordinate."""
        return self.event.noise_multiplier * self.clip_norm

    def empty_sum(self, dimension: int) -> ClippedSum:
        return ClippedSum(dimension, clip_norm=self.clip_norm, noise_multiplier=self.event.noise_multiplier)


def noise_floor(mechanism: AuditedMechanism, *, values: int) -> Check:
    """A1: what is released from empty and from equal batches is the accounted noise and nothing else.

    Args:
        values: coordinates per release; the standard error of the level is 1/√(2·values).
    """
    secret = SecureRandom()
    empty = mechanism.empty_sum(values)
    first_D, second_D = (empty.release(secret).numpy() / mechanism.scale for _ in range(2))
    twins_2D = np.stack([_released_batch(mechanism, values, secret) for _ in range(2)])
    difference_D = (twins_2D[0] - twins_2D[1]) / (mechanism.scale * 2**0.5)
    lattice_2D = twins_2D / empty.spacing
    level = _STANDARD_ERRORS / (2 * values) ** 0.5
    drift = _STANDARD_ERRORS / values**0.5
    return Check(
        code="A1",
        title="Is the noise there, at the level that is accounted?",
        tested="Empty batches and pairs of equal batches were released by the code that trains; "
        "two processes and one process twice drew noise under the same seed.",
        meaning="Every released number carries Gaussian noise of the charged size, new each time, "
        f"that no seed brings back. A noise that is off by more than {2 * level:.1%} fails.",
        not_proven="That the secret keystream cannot be predicted: it is the operating system's and AES's. "
        "Tails beyond what this many draws reach.",
        figures=(
            Figure("standard deviation of an empty batch, relative to σC", first_D.std(), 1 - level, 1 + level),
            Figure("of the difference of equal batches, relative to √2·σC", difference_D.std(), 1 - level, 1 + level),
            Figure("mean of an empty batch, relative to σC", first_D.mean(), -drift, drift),
            Figure("fit to a Gaussian, p-value", stats.kstest(first_D, "norm").pvalue, _SMALLEST_P_VALUE),
            Figure("correlation of two releases", float(np.corrcoef(first_D, second_D)[0, 1]), -drift, drift),
            Figure("numbers off the lattice", float((lattice_2D != np.rint(lattice_2D)).sum()), 0, 0),
            Figure("draws repeated by a seed, in one process", float(repeated_in_one_process()), 0, 0),
            Figure("draws repeated by a seed, in two processes", float(repeated_in_another_process()), 0, 0),
        ),
    )


def _released_batch(mechanism: AuditedMechanism, values: int, secret: SecureRandom) -> np.ndarray:
    batch = mechanism.empty_sum(values)
    batch.add(torch.linspace(-1.0, 1.0, 3 * values).view(3, values))
    return batch.release(secret).numpy()


def sensitivity(mechanism: AuditedMechanism, *, values: int) -> Check:
    """A2: one unit more or less moves the sum, noise off, by at most C, whatever its gradient.

    Args:
        values: D, coordinates of a gradient.
    """
    generator = torch.Generator().manual_seed(0)
    others_UD = torch.randn(5, values, generator=generator) * torch.tensor([[1e-6], [0.01], [1.0], [1e3], [1e30]])
    units = hostile_gradients(values, mechanism.clip_norm, mechanism.empty_sum(values).spacing, generator)
    moved = {name: _moved(mechanism, others_UD, unit_D) for name, unit_D in units.items()}
    silent = max(moved[name] for name in ("one value is not a number", "one value is infinite"))
    return Check(
        code="A2",
        title="Can one record move the sum by more than the clip?",
        tested=f"{len(units)} made-up gradients ({', '.join(units)}) were added to a batch, together with it and "
        "after it, and the exact sums with and without were compared.",
        meaning="No single unit moves what is released by more than C, the size the noise is measured against.",
        not_proven="That the gradients themselves are computed unit by unit: a loss that mixes the units of a batch "
        "breaks this before the clip. Each objective has its own test for that.",
        figures=(
            Figure("largest movement, relative to C", max(moved.values()), 0.99, 1.0),
            Figure("movement by a gradient that is not finite, relative to C", silent, 0.0, 0.0),
        ),
    )


def hostile_gradients(values: int, clip_norm: float, spacing: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Gradients [D], float32, chosen against the clip and the lattice, by name."""
    ordinary = torch.randn(values, generator=generator)
    one = torch.zeros(values)
    one[values // 2] = 1.0
    not_a_number, infinite = ordinary.clone(), ordinary.clone()
    not_a_number[0], infinite[-1] = float("nan"), float("inf")
    mixed = ordinary.clone()
    mixed[::2] *= 1e-42
    mixed[1::2] *= 1e30
    halfway = (math.floor(0.9999 * clip_norm / values**0.5 / spacing) + 0.5) * spacing
    length = torch.linalg.vector_norm(ordinary.double())
    return {
        "ordinary": ordinary,
        "just at the clip": (ordinary.double() * (clip_norm / length)).float(),
        "between lattice points": torch.full((values,), halfway),
        "huge": torch.full((values,), torch.finfo(torch.float32).max),
        "tiny": ordinary * 1e-30,
        "denormal": torch.full((values,), 1e-42),
        "all in one coordinate": one * 1e6,
        "huge in one coordinate": -one * torch.finfo(torch.float32).max,
        "denormal beside huge": mixed,
        "one value is not a number": not_a_number,
        "one value is infinite": infinite,
    }


def _moved(mechanism: AuditedMechanism, others_UD: Tensor, unit_D: Tensor) -> float:
    """‖sum with the unit - sum without‖ / C, the larger of added within the batch and after it."""
    without = _exact_sum(mechanism, others_UD)
    together = _exact_sum(mechanism, torch.cat([unit_D[None], others_UD]))
    after = _exact_sum(mechanism, others_UD, unit_D[None])
    norms = [torch.linalg.vector_norm(with_it - without).item() for with_it in (together, after)]
    return max(norms) / mechanism.clip_norm


def _exact_sum(mechanism: AuditedMechanism, *parts_UD: Tensor) -> Tensor:
    total = mechanism.empty_sum(parts_UD[0].shape[1])
    for part_UD in parts_UD:
        total.add(part_UD)
    return total.unsafe_release_without_noise()


def sampling(mechanism: AuditedMechanism, *, units: int, steps: int) -> Check:
    """A3: every unit enters every batch independently with probability q.

    All figures but the first are z-scores with their exact variance under Poisson sampling.
    """
    q = mechanism.event.sampling_rate
    secret = SecureRandom()
    drawn_TU = np.stack([secret.bernoulli(q, units) for _ in range(steps)]).astype(np.float64)
    rate = float(drawn_TU.mean())
    if q == 1:
        figures: tuple[Figure, ...] = (Figure("share of units in a batch, all expected", rate, 1, 1),)
    else:
        spread = _STANDARD_ERRORS * (q * (1 - q) / (units * steps)) ** 0.5
        centred_TU = drawn_TU - q
        scores = {
            "how often each unit was drawn, against Binomial(T, q)": _dispersion(drawn_TU.sum(axis=0), steps, q),
            "how much batch sizes vary, against Binomial(N, q)": _dispersion(drawn_TU.sum(axis=1), units, q),
            "two units in one batch": _product(centred_TU[:, :-1], centred_TU[:, 1:], q),
            "one unit in two successive batches": _product(centred_TU[:-1], centred_TU[1:], q),
        }
        figures = (
            Figure("share of units in a batch", rate, q - spread, q + spread),
            *(Figure(f"{name}, z-score", score, -_STANDARD_ERRORS, _STANDARD_ERRORS) for name, score in scores.items()),
        )
    return Check(
        code="A3",
        title="Are batches drawn as the accounting assumes?",
        tested=f"{steps} batches were drawn from {units} units at rate {q:g} by the code that samples.",
        meaning="Every unit is in every batch with the charged probability, independently of the others and of "
        "earlier batches; batches have no fixed size. Accounting a fixed size this way would claim too little.",
        not_proven="That training asks for this rate: the trainer's own test does. Dependence between units far apart.",
        figures=figures,
    )


def _dispersion(counts: np.ndarray, trials: int, q: float) -> float:
    """z-score of Pearson's chi-square of counts against Binomial(trials, q), with its exact variance."""
    variance = trials * q * (1 - q)
    chi_square = ((counts - trials * q) ** 2).sum() / variance
    of_one = 2 + (1 - 6 * q * (1 - q)) / variance
    return float((chi_square - len(counts)) / (len(counts) * of_one) ** 0.5)


def _product(left: np.ndarray, right: np.ndarray, q: float) -> float:
    """z-score of the sum of products of centred, uncorrelated draws."""
    return float((left * right).sum() / (q * (1 - q) * left.size**0.5))
