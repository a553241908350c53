"""What one attacker can do with nothing but its own update."""

from __future__ import annotations

import numpy as np

from deploy.attacks.scene import Scene

BOOST = 10.0


def sign_flip(scene: Scene) -> np.ndarray:
    """The negative of its update: inside the norm, so no check of one update alone can see it."""
    return -scene.own_D


def scale(scene: Scene) -> np.ndarray:
    """Its update turned around and boosted to ten times the plan's clip."""
    return -BOOST * scene.plan.clip_norm / max(float(np.linalg.norm(scene.own_D)), 1e-12) * scene.own_D


def planted(scene: Scene) -> np.ndarray:
    """The change that puts the backdoor in, within the clip norm."""
    return scene.within_clip(scene.planted_D)


def boosted(scene: Scene) -> np.ndarray:
    """The same times sites per attacker, so that the mean of all becomes it (Bagdasaryan et al. 2018, 1807.00459)."""
    return planted(scene) * (scene.sites / scene.attackers)


def nan(scene: Scene) -> np.ndarray:
    """One value that is not a number."""
    changed_D = scene.own_D.copy()
    changed_D[0] = np.nan
    return changed_D


def free_ride(scene: Scene) -> np.ndarray:
    """Noise of half the allowed norm, without training: it wants the result and gives nothing for it."""
    noise_D = np.random.default_rng(scene.seed).normal(size=scene.own_D.size)
    return noise_D * (0.5 * scene.plan.clip_norm / np.linalg.norm(noise_D))
