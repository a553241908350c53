"""The Gaussian mechanism on per-unit gradients: clip, sum on a lattice, add noise.

Each unit is clipped so that, after rounding to the lattice, its norm is at most
C; the sum is exact integer arithmetic. Adding or removing one unit therefore
changes the sum by at most C, and with noise of standard deviation σ·C one step
is what `common.accounting.PrivateSteps` accounts for. The divisor is a public
constant, never the size of the batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from common.errors import PrivacyError
from edge_node.training.noise import SecureRandom, lattice_spacing

RESERVE = 5e-3
"""Share of C kept free. In float32's last bits a unit's gradient depends on the pass it shares with others, so one unit
more also moves those: measured over 255 units by 2e-6 of C, and by 8e-4 under an adapter made to amplify it; the
trainer shares no passes where the adapter is larger than that. Measured, not proven: `one-unit` shares nothing."""


class ClippedSum:
    """An exact running sum of clipped unit gradients, in integers.

    Args:
        dimension: D, values per unit.
        clip_norm: C, the L2 bound on one unit's contribution.
        noise_multiplier: σ; fixes the lattice. 0 is for parity tests only.
    """

    def __init__(self, dimension: int, *, clip_norm: float, noise_multiplier: float) -> None:
        self.clip_norm = clip_norm
        self.noise_multiplier = noise_multiplier
        self.spacing = lattice_spacing(clip_norm, noise_multiplier)
        self._rounded_clip = clip_norm * (1 - RESERVE) - self.spacing * math.sqrt(dimension) / 2
        self._sum_D = torch.zeros(dimension, dtype=torch.int64)

    def add(self, gradients_UD: Tensor) -> None:
        """Clip each row and add it; a row that is not finite counts as zero.

        Stopping on such a row would tell the aggregator that one record has it.
        """
        for gradient_D in gradients_UD:  # one row after the other: float64 of all of them would be the step's memory
            row_D = gradient_D.to(torch.float64, copy=True)
            norm = float(torch.linalg.vector_norm(row_D))
            if math.isfinite(norm):
                scale = min(self._rounded_clip / norm, 1.0) if norm > 0 else 1.0
                self._sum_D += row_D.mul_(scale / self.spacing).round_().to("cpu", torch.int64)

    def release(self, random: SecureRandom) -> Tensor:
        """The noisy sum, float64 [D]: the only thing computed from the units that may be used."""
        if self.noise_multiplier <= 0:
            raise PrivacyError("release() without noise; only unsafe_release_without_noise() does that")
        scale = self.noise_multiplier * self.clip_norm / self.spacing
        noise_D = np.rint(random.normal(self._sum_D.numel()) * scale).astype(np.int64)
        return (self._sum_D + torch.from_numpy(noise_D)).double() * self.spacing

    def unsafe_release_without_noise(self) -> Tensor:
        """The clipped sum itself: no privacy. For parity tests and `--unsafe-no-dp`."""
        return self._sum_D.double() * self.spacing
