"""What attackers can do who know more than their own update; all of it stays within the clip norm.

The first three are given the honest updates of the round, more than attackers have
outside of a simulation: what a rule withstands here it withstands. Where there are
none, they take each other's own honest updates for a sample of them, as their
authors' weaker variants do.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from deploy.attacks.scene import Scene

IPM_LENGTH = 0.5
"""Times the honest mean, turned around."""

_BISECTIONS = 40


def alie(scene: Scene) -> np.ndarray:
    """A little is enough: as far from the mean as still looks likely, in every coordinate.

    Baruch et al. 2019, arXiv:1902.06156: mean − z · deviation, z such that enough honest updates lie farther out.
    """
    seen_SD = _seen(scene)
    sites, attackers = scene.sites, scene.attackers
    needed = sites // 2 + 1 - attackers
    likely = min(max((sites - attackers - needed) / (sites - attackers), 0.51), 0.9999)
    return scene.within_clip(seen_SD.mean(axis=0) - NormalDist().inv_cdf(likely) * seen_SD.std(axis=0))


def inner_product(scene: Scene) -> np.ndarray:
    """Half the honest mean, turned around (Xie et al. 2019, arXiv:1903.03936)."""
    return scene.within_clip(-IPM_LENGTH * _seen(scene).mean(axis=0))


def min_max(scene: Scene) -> np.ndarray:
    """As far against the honest mean as no farther from any honest update than two of them are from each other.

    Shejwalkar & Houmansadr 2021, "Manipulating the Byzantine" (NDSS), with the inverse unit vector.
    """
    seen_SD = _seen(scene)
    mean_D = seen_SD.mean(axis=0)
    against_D = -mean_D / max(float(np.linalg.norm(mean_D)), 1e-12)
    widest = max(float(np.linalg.norm(seen_SD - row_D, axis=1).max()) for row_D in seen_SD)
    low, high = 0.0, 2 * widest + float(np.linalg.norm(mean_D))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if float(np.linalg.norm(seen_SD - mean_D - middle * against_D, axis=1).max()) <= widest:
            low = middle
        else:
            high = middle
    return scene.within_clip(mean_D + low * against_D)


def sybil(scene: Scene) -> np.ndarray:
    """All send the same: the mean of what they trained, turned around, at the clip norm (Fung et al. 1808.04866)."""
    mean_D = scene.colluders_KD.mean(axis=0, dtype=np.float64)
    return -scene.plan.clip_norm * mean_D / max(float(np.linalg.norm(mean_D)), 1e-12)


def _seen(scene: Scene) -> np.ndarray:
    return (scene.honest_HD if len(scene.honest_HD) else scene.colluders_KD).astype(np.float64)
