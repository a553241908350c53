"""Centred clipping: from a centre, the mean of the clipped differences to it, a few times.

Karimireddy et al. 2021, arXiv:2012.10333. There the centre is the last round's
result and the radius a constant. Here a round stands for itself: the first centre
is the geometric median, which no minority of liars can move far, and the radius is
the median distance to the centre. So nothing has to be tuned or kept.
"""

from __future__ import annotations

import numpy as np

from aggregator.rules.distances import distances_to_mixture, gram
from aggregator.rules.geometric_median import median_shares
from aggregator.rules.mean import mixture

ITERATIONS = 5


def centred_clipping(updates_ND: np.ndarray) -> np.ndarray:
    """The centre after five steps; float32 [D]."""
    return mixture(updates_ND, clipped_shares(gram(updates_ND)))


def clipped_shares(gram_NN: np.ndarray) -> np.ndarray:
    """Each update's share in the result, which is a weighted mean of them; float64 [N]."""
    sites = len(gram_NN)
    shares_N = median_shares(gram_NN)
    for _ in range(ITERATIONS):
        distances_N = distances_to_mixture(gram_NN, shares_N)
        radius = np.median(distances_N)
        kept_N = np.divide(radius, distances_N, out=np.ones(sites), where=distances_N > radius) / sites
        shares_N = (1 - kept_N.sum()) * shares_N + kept_N
    return shares_N
