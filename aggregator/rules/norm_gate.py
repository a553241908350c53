"""Leaving out updates that are too long. Stops boosting and nothing else."""

from __future__ import annotations

import numpy as np

TIMES_MEDIAN = 3.0
"""Times the median norm that an update may be long: honest ones between 0.3 C and C are hardly ever longer."""


def norm_gate(norms_N: np.ndarray, *, largest: float) -> np.ndarray:
    """Which norms are finite and at most `largest`; bool [N]."""
    return np.isfinite(norms_N) & (np.asarray(norms_N) <= largest)
