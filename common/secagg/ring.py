"""Updates as whole numbers modulo 2³²: what is masked, summed and unmasked exactly.

The range is the clip norm: a coordinate of a clipped update is at most C, so the
sum of all weighted updates is at most C · W, and 2³⁰ steps of C · W / 2³⁰ each
leave it room. Rounding is stochastic, so it has no bias.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import PrivacyError
from common.secagg.masking import keystream

LARGEST_WEIGHT = 4096
"""Of a federation; above it the ring's steps get too coarse."""

_CHUNK = 1 << 18


@dataclass(frozen=True)
class Ring:
    """Attributes:
    clip_norm: L2 bound C of one site's update.
    total_weight: sum W of all sites' weights, whoever takes part.
    """

    clip_norm: float
    total_weight: int

    @property
    def scale(self) -> float:
        """Steps per unit."""
        return 2.0**30 / (self.clip_norm * self.total_weight)

    def quantise(self, update_D: np.ndarray, *, weight: int, key: bytes) -> np.ndarray:
        """Clip, weigh and round an update; uint32, to be read modulo 2³².

        Args:
            update_D: one site's floats.
            key: 32 fresh random bytes; the rounding's draws are its keystream.
        Raises:
            PrivacyError: a value is not finite.
        """
        norm = float(np.linalg.norm(update_D.astype(np.float64)))
        if not np.isfinite(norm):
            raise PrivacyError("the update holds values that are not finite")
        factor = weight * self.scale * (min(1.0, self.clip_norm / norm) if norm else 1.0)
        draws_D = np.frombuffer(keystream(key, 4 * len(update_D)), "<u4")
        words_D = np.empty(len(update_D), np.uint32)
        for start in range(0, len(words_D), _CHUNK):
            part = slice(start, start + _CHUNK)
            steps = update_D[part].astype(np.float64) * factor + draws_D[part] * 2.0**-32
            words_D[part] = np.floor(steps).astype(np.int64).astype(np.uint32)
        return words_D

    def values(self, words_D: np.ndarray) -> np.ndarray:
        """The floats that words stand for, float64."""
        return words_D.view(np.int32) / self.scale

    def rounding_norm(self, dimension: int, sites: int) -> float:
        """L2 norm that rounding may add to a sum: no word moves by more than one step."""
        return sites * float(np.sqrt(dimension)) / self.scale
