"""What a hostile site sends instead of its update; simulations only.

The attacker owns a real site with a valid identity. It trains honestly and
changes the result before sealing, so everything up to the aggregator's checks is
production code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from safetensors.numpy import save

from common.plan import RoundPlan
from common.update import PrivateUpdate

BOOST = 10.0


def scale(update: PrivateUpdate, plan: RoundPlan) -> bytes:
    """Its update turned around and boosted to ten times the plan's clip."""
    factor = np.float32(-BOOST * plan.clip_norm / max(update.norm, 1e-12))
    return save({name: factor * tensor for name, tensor in update.tensors.items()})


def sign_flip(update: PrivateUpdate, plan: RoundPlan) -> bytes:
    """The negative of its update: inside the norm, so no check of one update alone can see it."""
    return save({name: -tensor for name, tensor in update.tensors.items()})


def nan(update: PrivateUpdate, plan: RoundPlan) -> bytes:
    """One value that is not a number."""
    tensors = {name: np.array(tensor) for name, tensor in update.tensors.items()}
    next(iter(tensors.values())).flat[0] = np.nan
    return save(tensors)


def garbage(update: PrivateUpdate, plan: RoundPlan) -> bytes:
    """Bytes that are no update at all."""
    return bytes(len(update.file_bytes))


ATTACKS: Mapping[str, Callable[[PrivateUpdate, RoundPlan], bytes]] = {
    "scale": scale,
    "sign-flip": sign_flip,
    "nan": nan,
    "garbage": garbage,
}
