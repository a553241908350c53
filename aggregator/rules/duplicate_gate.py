"""Leaving out updates that are much closer to another one than honest noise permits.

Every honest update carries noise of its own, so two of them are never near each
other; copies of one lie are. Owners of several sites who add noise of their own
pass. Two honest sites with the same customers may be caught: being left out is no
proof of malice.
"""

from __future__ import annotations

import numpy as np

CLOSEST = 0.35
"""Times the median distance to the nearest other."""


def duplicate_gate(distances_NN: np.ndarray) -> np.ndarray:
    """Which rows are no near-duplicate of another; bool [N].

    Args:
        distances_NN: not squared.
    """
    others_NN = np.array(distances_NN, np.float64)
    np.fill_diagonal(others_NN, np.inf)
    nearest_N = others_NN.min(axis=1)
    return nearest_N >= CLOSEST * np.median(nearest_N)
