"""Weighted mean of updates (McMahan et al. 2017, arXiv:1602.05629). Tolerates no liar."""

from __future__ import annotations

import numpy as np

from aggregator.rules.columns import BLOCK
from common.errors import RoundError

LARGEST_SHARE = 0.25
"""No site counts for more than this, or than 1 / n where there are fewer than four."""


def weighted_mean(updates_ND: np.ndarray, weights_N: np.ndarray) -> np.ndarray:
    """Σ wᵢ uᵢ / Σ wᵢ, float32 [D], with a relative error of at most N · 2⁻²³ of Σ wᵢ |uᵢ| / Σ wᵢ.

    Args:
        weights_N: not negative, not all zero.
    """
    shares_N = np.asarray(weights_N, np.float64) / np.sum(weights_N, dtype=np.float64)
    return mixture(updates_ND, shares_N)


def mixture(updates_ND: np.ndarray, shares_N: np.ndarray) -> np.ndarray:
    """Σ sᵢ uᵢ, float32 [D]; at the speed of memory, so there is nothing for threads to do."""
    used = np.flatnonzero(shares_N)
    rows = slice(None) if len(used) == len(updates_ND) else used  # copies no row; what has no share is not even read
    shares_N = shares_N[used].astype(np.float32)
    result_D = np.empty(updates_ND.shape[1], np.float32)
    for start in range(0, len(result_D), BLOCK):
        block = slice(start, start + BLOCK)
        np.matmul(shares_N, updates_ND[rows, block], out=result_D[block])
    return result_D


def capped_shares(weights_N: np.ndarray) -> np.ndarray:
    """Shares of the whole in proportion to the weights, none above max(¼, 1 / n); they sum to 1.

    What a share loses at the cap goes to the others in proportion to their weights.

    Raises:
        RoundError: a weight is not positive.
    """
    weights_N = np.asarray(weights_N, np.float64)
    if not (weights_N > 0).all():
        raise RoundError("every weight must be positive")
    cap = max(LARGEST_SHARE, 1 / len(weights_N))
    capped_N = np.zeros(len(weights_N), bool)
    while True:
        room = 1.0 - cap * capped_N.sum()
        free = weights_N[~capped_N].sum()
        shares_N = np.where(capped_N, cap, weights_N * (room / free if free else 0.0))
        over_N = ~capped_N & (shares_N > cap * (1 + 1e-12))
        if not over_N.any():
            return shares_N
        capped_N |= over_N
