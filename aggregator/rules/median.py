"""Coordinate-wise median."""

from __future__ import annotations

import numpy as np

from aggregator.rules.columns import coordinatewise
from aggregator.rules.sorting_network import sorted_rows


def coordinate_median(updates_ND: np.ndarray) -> np.ndarray:
    """The median of each coordinate, the mean of the middle two for an even number; float32 [D].

    Yin et al. 2018, arXiv:1803.01498, Def. 1. With fewer liars than half, every
    coordinate lies between two honest ones.
    """
    return coordinatewise(block_median, updates_ND)


def block_median(block_NK: np.ndarray) -> np.ndarray:
    """The median of each column of a block."""
    middle = (len(block_NK) - 1) // 2
    rows = sorted_rows(block_NK, middle, len(block_NK) // 2 + 1)
    return rows[0] if len(rows) == 1 else rows[0] * np.float32(0.5) + rows[1] * np.float32(0.5)
