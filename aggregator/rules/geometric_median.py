"""Geometric median by smoothed Weiszfeld iterations.

Pillutla et al. 2019, arXiv:1912.13445, algorithm 2. Each iterate is a weighted
mean of the updates, so its distances follow from their Gram matrix, and the
updates themselves are read twice, however many iterations there are.
"""

from __future__ import annotations

import numpy as np

from aggregator.rules.distances import distances_to_mixture, gram, squared_distances
from aggregator.rules.mean import mixture

SMOOTHING = 1e-6
"""Smallest distance that counts, relative to the typical distance between two updates."""

_ITERATIONS = 200
_TOLERANCE = 1e-9


def geometric_median(updates_ND: np.ndarray) -> np.ndarray:
    """The point with the least sum of distances to the updates; float32 [D].

    With a fraction a < ½ of liars it is at most 2 (1 − a) / (1 − 2a) times as far from any point as the farthest
    honest update.
    """
    return mixture(updates_ND, median_shares(gram(updates_ND)))


def median_shares(gram_NN: np.ndarray) -> np.ndarray:
    """Each update's share in the geometric median, from their Gram matrix; float64 [N]."""
    sites = len(gram_NN)
    middles_N = np.sort(squared_distances(gram_NN), axis=1)[:, sites // 2]
    typical = float(np.sqrt(np.sort(middles_N)[(sites - 1) // 2]))  # a minority cannot make it larger than honest ones
    if typical == 0.0:  # more than half are equal: they are the median
        equal_N = middles_N == 0.0
        return equal_N / equal_N.sum()
    smallest = SMOOTHING * typical
    shares_N = np.full(sites, 1 / sites)
    for _ in range(_ITERATIONS):
        pulls_N = 1 / np.maximum(distances_to_mixture(gram_NN, shares_N), smallest)
        before_N, shares_N = shares_N, pulls_N / pulls_N.sum()
        if np.abs(shares_N - before_N).max() < _TOLERANCE:
            break
    return shares_N
