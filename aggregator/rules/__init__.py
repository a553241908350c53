"""Robust aggregation rules: pure functions from `updates_ND` to one `delta_D`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aggregator.rules.mean import weighted_mean
from aggregator.rules.nnm import nearest_neighbour_mixing
from aggregator.rules.trimmed_mean import trimmed_mean

RuleFunction = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """How accepted updates become one.

    Attributes:
        combine: (updates_ND, weights_N, tolerated) to delta_D.
        minimum_sites: smallest federation the rule is for.
        minimum_updates: fewest accepted updates it can work with, by the liars it must tolerate.
    """

    combine: RuleFunction
    minimum_sites: int
    minimum_updates: Callable[[int], int]


def _mean(updates_ND: np.ndarray, weights_N: np.ndarray, tolerated: int) -> np.ndarray:
    return weighted_mean(updates_ND, weights_N)


def _nnm_trimmed_mean(updates_ND: np.ndarray, weights_N: np.ndarray, tolerated: int) -> np.ndarray:
    return trimmed_mean(nearest_neighbour_mixing(updates_ND, liars=tolerated), trim=tolerated)


RULES = {
    "mean": Rule(_mean, minimum_sites=3, minimum_updates=lambda tolerated: 2),
    "nnm-trimmed-mean": Rule(_nnm_trimmed_mean, minimum_sites=6, minimum_updates=lambda tolerated: 2 * tolerated + 1),
}
"""Rule by its name on the command line. Robust rules ignore contract weights: a weight is a claim."""


def default_rule(sites: int) -> str:
    """The mean for small federations, NNM + trimmed mean from six sites on."""
    return "nnm-trimmed-mean" if sites >= RULES["nnm-trimmed-mean"].minimum_sites else "mean"


def tolerated_liars(sites: int) -> int:
    """f = max(1, ⌊(n − 1) / 4⌋) false updates among those of `sites`."""
    return max(1, (sites - 1) // 4)
