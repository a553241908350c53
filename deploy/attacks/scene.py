"""What an attacker works with when it is asked for its update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import save

from common.plan import RoundPlan


@dataclass(frozen=True, eq=False)
class Scene:
    """One attacker in one round.

    Attributes:
        shapes: of the tensors this round trains by PEFT name, sorted.
        own_D: the update it trained; zeros where it does not train.
        attackers: how many sites attack.
        colluders_KD: what all attackers trained, in the order of their names; its own alone where it does not look.
        honest_HD: what the honest sites will send, as far as it is known; no rows for an attack that does not look.
        seed: its own, for what it draws.
        planted_D: a change that puts the backdoor in, fine-tuned without privacy; empty for other attacks.
    """

    plan: RoundPlan
    shapes: Mapping[str, tuple[int, ...]]
    own_D: np.ndarray
    attackers: int
    colluders_KD: np.ndarray
    honest_HD: np.ndarray
    seed: int
    planted_D: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def sites(self) -> int:
        return len(self.plan.weights)

    def file(self, delta_D: np.ndarray) -> bytes:
        """A vector as an honest site would encode it."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        parts = np.split(delta_D.astype(np.float32), ends[:-1])
        return save({n: part.reshape(shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)})

    def within_clip(self, delta_D: np.ndarray) -> np.ndarray:
        """A vector, shortened to the plan's clip norm: no check of one update alone can see what it is."""
        norm = float(np.linalg.norm(delta_D))
        return delta_D * min(1.0, self.plan.clip_norm / max(norm, 1e-12))
