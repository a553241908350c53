"""Leaving out updates that are too long. Stops boosting and nothing else."""

from __future__ import annotations

import numpy as np

CLIP_ALLOWANCE = 1.15
"""Times the plan's clip that a sketch's norm may be: what a projection to 512 dimensions adds at most."""

TIMES_MEDIAN = 1.5
"""Times the median norm an update may be long where no bound is given."""


def norm_gate(norms_N: np.ndarray, *, largest: float) -> np.ndarray:
    """Which norms are finite and at most `largest`; bool [N]."""
    return np.isfinite(norms_N) & (np.asarray(norms_N) <= largest)
