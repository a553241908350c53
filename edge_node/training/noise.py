"""Secret randomness for the mechanism: sampling and Gaussian noise from a CSPRNG.

No seed reproduces it. The keystream is AES-256-CTR keyed from the operating
system. A normal draw is the mean-preserving sum of four Box–Muller draws, which
hides the low bits an attacker would need (Holohan & Braghin 2021,
arXiv:2107.10138); what is released lies on an integer lattice, so its support
does not depend on the data (Mironov 2012).
"""

from __future__ import annotations

import math
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_LATTICE_BITS = 28


class SecureRandom:
    """Draws from AES-256-CTR under a key nobody knows."""

    def __init__(self) -> None:
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16)))
        self._keystream = cipher.encryptor()

    def _bits53(self, count: int) -> np.ndarray:
        words = np.frombuffer(self._keystream.update(bytes(8 * count)), np.uint64)
        return (words >> np.uint64(11)).astype(np.float64)

    def uniform(self, count: int) -> np.ndarray:
        """Multiples of 2⁻⁵³ in [0, 1)."""
        return self._bits53(count) * 2.0**-53

    def bernoulli(self, rate: float, count: int) -> np.ndarray:
        """Boolean mask, each entry true with probability `rate`: one Poisson-sampled batch."""
        return self.uniform(count) < rate

    def normal(self, count: int) -> np.ndarray:
        """Standard normal draws, float64."""
        return np.sum([self._box_muller(count) for _ in range(4)], axis=0) / 2.0

    def _box_muller(self, count: int) -> np.ndarray:
        half = (count + 1) // 2
        radius = np.sqrt(-2.0 * np.log((self._bits53(half) + 1.0) * 2.0**-53))
        angle = self.uniform(half) * (2.0 * math.pi)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def lattice_spacing(clip_norm: float, noise_multiplier: float) -> float:
    """Distance of lattice points: a power of two, 2⁻²⁸ of the mechanism's scale."""
    return 2.0 ** (math.floor(math.log2(max(noise_multiplier, 1.0) * clip_norm)) - _LATTICE_BITS)
