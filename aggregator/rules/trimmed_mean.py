"""Coordinate-wise trimmed mean."""

from __future__ import annotations

import numpy as np

from common.errors import RoundError


def trimmed_mean(updates_ND: np.ndarray, *, trim: int) -> np.ndarray:
    """Average each coordinate after dropping its `trim` extremes at both ends; float32 [D].

    Yin et al. 2018, arXiv:1803.01498, Def. 2.

    Args:
        updates_ND: one row per site, each row L2-bounded by validation.
        trim: liars tolerated; 2 * trim < N.
    Raises:
        RoundError: N <= 2 * trim.
    """
    sites = len(updates_ND)
    if sites <= 2 * trim:
        raise RoundError(f"a trimmed mean that tolerates {trim} needs more than {2 * trim} updates, got {sites}")
    sorted_ND = np.sort(updates_ND, axis=0)
    return sorted_ND[trim : sites - trim].mean(axis=0, dtype=np.float64).astype(np.float32)
