"""Krum and multi-Krum: keep the updates that have the closest neighbours.

Blanchard et al. 2017, arXiv:1703.02757. For N ≥ 2f + 3 a kept update is no
farther from some honest one than √((N − f − 2) / (N − 2f − 1)) times the largest
distance between two honest ones.
"""

from __future__ import annotations

import numpy as np

from aggregator.rules.distances import gram, squared_distances
from common.errors import RoundError


def krum(updates_ND: np.ndarray, *, liars: int) -> np.ndarray:
    """Index of the update with the best score, as [1]."""
    return np.argsort(krum_scores(gram(updates_ND), liars=liars), kind="stable")[:1]


def multi_krum(updates_ND: np.ndarray, *, liars: int) -> np.ndarray:
    """Indices of the N − liars updates with the best scores, in order of the rows."""
    scores_N = krum_scores(gram(updates_ND), liars=liars)
    return np.sort(np.argsort(scores_N, kind="stable")[: len(updates_ND) - liars])


def krum_scores(gram_NN: np.ndarray, *, liars: int) -> np.ndarray:
    """Sum of squared distances to the N − liars − 2 nearest others; the less the better.

    Raises:
        RoundError: N < 2 · liars + 3.
    """
    sites = len(gram_NN)
    if sites < 2 * liars + 3:
        raise RoundError(f"Krum that tolerates {liars} needs at least {2 * liars + 3} updates, got {sites}")
    distances_NN = squared_distances(gram_NN)
    np.fill_diagonal(distances_NN, np.inf)
    return np.sort(distances_NN, axis=1)[:, : sites - liars - 2].sum(axis=1)
