"""Coordinate-wise trimmed mean."""

from __future__ import annotations

import numpy as np

from aggregator.rules.columns import coordinatewise
from aggregator.rules.sorting_network import sorted_rows
from common.errors import RoundError


def trimmed_mean(updates_ND: np.ndarray, *, trim: int) -> np.ndarray:
    """Average each coordinate after dropping its `trim` extremes at both ends; float32 [D].

    Yin et al. 2018, arXiv:1803.01498, Def. 2. Every coordinate lies between two honest ones.

    Args:
        updates_ND: one row per site, each row L2-bounded by validation.
        trim: liars tolerated; 2 * trim < N.
    Raises:
        RoundError: N <= 2 * trim.
    """
    sites = len(updates_ND)
    if sites <= 2 * trim:
        raise RoundError(f"a trimmed mean that tolerates {trim} needs more than {2 * trim} updates, got {sites}")
    return coordinatewise(lambda block_NK: block_trimmed_mean(block_NK, trim=trim), updates_ND)


def block_trimmed_mean(block_NK: np.ndarray, *, trim: int) -> np.ndarray:
    """The trimmed mean of each column of a block."""
    middle = sorted_rows(block_NK, trim, len(block_NK) - trim)
    total_K = middle[0].astype(np.float64)
    for row_K in middle[1:]:
        total_K += row_K
    return total_K / len(middle)
