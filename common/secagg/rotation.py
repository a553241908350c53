"""A public random rotation, which spreads an update over its coordinates and is undone again.

Random signs and a Walsh–Hadamard transform of the first B coordinates, then the same
of the last B, where B is the largest power of two within the dimension D. Nothing is
padded: D coordinates stay D.

For every x that does not depend on the seed, each coordinate of the result y is
sub-Gaussian with variance at most |x|² / B, which is below 2 |x|² / D:

    P(|y_j| > κ |x| / √B) ≤ 2 exp(−κ² / 2)

The first transform gives it for the first B coordinates, given which signs (Hoeffding);
the second for the last B, whose norm is at most |x| whatever the first did.

It hides nothing, since its seed is public, and nobody is protected by it. Whoever
knows the seed beforehand can make an x that it does not spread.

Ailon & Chazelle 2009, "The fast Johnson–Lindenstrauss transform"; Suresh et al. 2017,
"Distributed mean estimation with limited communication".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.secagg.encoding import digest
from common.secagg.masking import keystream

_RADIX = 16
"""Of one pass of the transform: a product with a matrix of this size, by BLAS."""


@dataclass(frozen=True)
class _Signs:
    seed: bytes
    turn: int


@dataclass(frozen=True)
class Rotation:
    """An orthogonal map of float32 [dimension] onto itself, exact to about 10⁻⁶ of the norm.

    Attributes:
        seed: 32 public bytes.
        dimension: at least 1.
    """

    seed: bytes
    dimension: int

    @property
    def block(self) -> int:
        """B, the largest power of two within the dimension."""
        return 1 << (self.dimension.bit_length() - 1)

    def apply(self, values_D: np.ndarray) -> np.ndarray:
        turned_D = self._copy(values_D)
        for turn, part_B in enumerate(self._parts(turned_D)):
            self._flip(part_B, turn)
            part_B[:] = walsh_hadamard(part_B)
        return turned_D

    def undo(self, turned_D: np.ndarray) -> np.ndarray:
        values_D = self._copy(turned_D)
        for turn, part_B in reversed(list(enumerate(self._parts(values_D)))):
            part_B[:] = walsh_hadamard(part_B)
            self._flip(part_B, turn)
        return values_D

    def _copy(self, values_D: np.ndarray) -> np.ndarray:
        if values_D.shape != (self.dimension,):
            raise ValueError(f"an array of shape {values_D.shape}, the rotation is of {self.dimension} coordinates")
        return np.array(values_D, np.float32)

    def _parts(self, values_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return values_D[: self.block], values_D[self.dimension - self.block :]

    def _flip(self, values_B: np.ndarray, turn: int) -> None:
        """Change the signs that one turn's keystream says, in place."""
        drawn = np.frombuffer(keystream(digest(_Signs(self.seed, turn)), -(-self.block // 8)), np.uint8)
        signs_B = np.unpackbits(drawn, count=self.block).astype(np.uint32)
        signs_B <<= 31
        values_B.view(np.uint32)[:] ^= signs_B


def walsh_hadamard(values_B: np.ndarray) -> np.ndarray:
    """The orthonormal transform of float32 [a power of two], in Hadamard's order; its own inverse."""
    stride, size = 1, len(values_B)
    while stride < size:
        radix = min(_RADIX, size // stride)
        matrix_RR = _hadamard(radix)
        if stride == 1:
            values_B = (values_B.reshape(-1, radix) @ matrix_RR).reshape(-1)
        else:
            values_B = np.matmul(matrix_RR, values_B.reshape(-1, radix, stride)).reshape(-1)
        stride *= radix
    return values_B


@lru_cache(maxsize=8)
def _hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix of a power of two, orthonormal, float32."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)
