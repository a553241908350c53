"""Weighted mean of updates (McMahan et al. 2017, arXiv:1602.05629). Tolerates no liar."""

from __future__ import annotations

import numpy as np


def weighted_mean(updates_ND: np.ndarray, weights_N: np.ndarray) -> np.ndarray:
    """Σ wᵢ uᵢ / Σ wᵢ, accumulated in float64, float32 [D].

    Args:
        weights_N: positive contract weights.
    """
    shares_N = np.asarray(weights_N, np.float64) / np.sum(weights_N)
    total_D = np.zeros(updates_ND.shape[1])
    for share, update_D in zip(shares_N, updates_ND, strict=True):
        total_D += share * update_D
    return total_D.astype(np.float32)
