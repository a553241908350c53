"""Leaving out updates that are too long. Stops boosting and nothing else."""

from __future__ import annotations

import numpy as np

TIMES_MEDIAN = 1.5
"""Times the median norm that an update may be long."""


def norm_gate(norms_N: np.ndarray, *, largest: float) -> np.ndarray:
    """Which norms are finite and at most `largest`; bool [N]."""
    return np.isfinite(norms_N) & (np.asarray(norms_N) <= largest)
