"""Updates as whole numbers modulo 2³² or 2¹⁶: what is masked, summed and unmasked exactly.

32 bits: the range is the clip norm. A coordinate of a clipped update is at most C, so
the sum of all weighted updates is at most C · W, and 2³⁰ steps of C · W / 2³⁰ each
leave it room. Where updates are projected on a direction of length √D, the projection
of one of weight w is at most C · w · √D; steps are as much coarser as that takes.

16 bits: the update is rotated first (`common.secagg.rotation`), and the range is
6 C / √B. What is above it is cut off, so that no sum of honest sites wraps. Cutting
loses 6 · 10⁻⁵ C or less (root of the mean square, over seeds, for every update that does
not depend on the seed); an update that would lose more than 1 % of C is refused.

Rounding is stochastic, so it has no bias. One update's has a norm of 5 · 10⁻¹⁰ √D W C
with 32 bits, where w √D takes W's place if that is more and there is a direction, and
1.3 · 10⁻⁴ W C with 16, or less (root of the mean square, before the weight): with 16
bits and the largest W, 3.4 % of C.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning"; Kairouz, Liu & Steinke 2021, "The distributed discrete Gaussian mechanism for
federated learning with secure aggregation" (rotated updates in small rings).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import PrivacyError, RoundError
from common.secagg.masking import keystream
from common.secagg.rotation import Rotation

LARGEST_WEIGHT = {32: 4096, 16: 256}
"""Of a federation, by the bits of a word; above it the ring's steps get too coarse."""

RANGE = 6.0
"""Of a rotated coordinate, in C / √B: at most 3 of 10⁸ are above it."""

LARGEST_LOSS = 0.01
"""Of the clip norm, that cutting rotated coordinates at the range may take from an update."""

_CHUNK = 1 << 18


@dataclass(frozen=True)
class Ring:
    """Attributes:
    clip_norm: L2 bound C of one site's update.
    total_weight: sum W of all sites' weights, whoever takes part.
    rotation: makes it a ring of 16 bits a word; without one it has 32.
    longest: largest |<u, v>| of a weighted update u in clip norms, for the longest v that it is projected on.
    """

    clip_norm: float
    total_weight: int
    rotation: Rotation | None = None
    longest: float = 0.0

    @property
    def dtype(self) -> np.dtype:
        """Of its words."""
        return np.dtype(np.uint32 if self.rotation is None else np.uint16)

    @property
    def scale(self) -> float:
        """Steps per unit."""
        if self.rotation is None:
            return 2.0**30 / (self.clip_norm * max(self.total_weight, self.longest))
        # every site's rounding may add a step, and there are no more sites than W
        return (2.0**15 - 1 - self.total_weight) / (self.range * self.total_weight)

    @property
    def range(self) -> float:
        """Largest absolute value of a coordinate of one update, before its weight."""
        return self.clip_norm if self.rotation is None else RANGE * self.clip_norm / self.rotation.block**0.5

    def coordinates(self, update_D: np.ndarray) -> np.ndarray:
        """What the words of an update stand for, neither clipped nor weighed."""
        return update_D if self.rotation is None else self.rotation.apply(update_D)

    def quantise(self, update_D: np.ndarray, *, weight: int, key: bytes) -> np.ndarray:
        """Clip, weigh and round an update; words to be read modulo 2³² or 2¹⁶.

        Args:
            update_D: one site's floats.
            key: 32 fresh random bytes; the rounding's draws are its keystream.
        Raises:
            PrivacyError: a value is not finite.
            RoundError: the rotation leaves too much of it above the range.
        """
        norm = float(np.linalg.norm(update_D.astype(np.float64)))
        if not np.isfinite(norm):
            raise PrivacyError("the update holds values that are not finite")
        clip = min(1.0, self.clip_norm / norm) if norm else 1.0
        if self.rotation is not None:
            update_D, clip = self._within_range(self.coordinates(update_D * clip)), 1.0
        factor = weight * self.scale * clip
        draws_D = np.frombuffer(keystream(key, 4 * len(update_D)), "<u4")
        words_D = np.empty(len(update_D), self.dtype)
        for start in range(0, len(words_D), _CHUNK):
            part = slice(start, start + _CHUNK)
            steps = update_D[part].astype(np.float64) * factor + draws_D[part] * 2.0**-32
            words_D[part] = np.floor(steps).astype(np.int64).astype(self.dtype)
        return words_D

    def _within_range(self, turned_D: np.ndarray) -> np.ndarray:
        cut_D = np.clip(turned_D, -self.range, self.range)
        loss = float(np.linalg.norm(turned_D - cut_D)) / self.clip_norm
        if loss > LARGEST_LOSS:
            reason = "the update does not fit words of 16 bits"
            raise RoundError(f"{reason}: cutting it to their range would take {loss:.1%} of the clip", public=reason)
        return cut_D

    def values(self, words_D: np.ndarray) -> np.ndarray:
        """The floats that words stand for, float64."""
        steps_D = self._steps(words_D)
        return (steps_D if self.rotation is None else self.rotation.undo(steps_D).astype(np.float64)) / self.scale

    def norm(self, words_D: np.ndarray) -> float:
        """L2 norm of what words stand for; no rotation changes it."""
        return float(np.linalg.norm(self._steps(words_D).astype(np.float64))) / self.scale

    def _steps(self, words_D: np.ndarray) -> np.ndarray:
        return words_D.view(np.int32 if self.rotation is None else np.int16)

    def rounding_norm(self, dimension: int, sites: int) -> float:
        """L2 norm that rounding may add to a sum: no word moves by more than one step."""
        return sites * float(np.sqrt(dimension)) / self.scale
