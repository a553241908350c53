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
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_LATTICE_BITS = 28
_BLOCK = 1 << 14


KEY_BYTES = 32


class SecureRandom:
    """Draws from AES-256-CTR under a key nobody knows.

    Args:
        key: 32 secret bytes of one round, so that an interrupted round goes on with the draws it had; fresh
            ones where there is none.
        stream: independent sequence under this key.
    """

    def __init__(self, key: bytes | None = None, *, stream: int = 0) -> None:
        counter = stream.to_bytes(8, "big") + bytes(8)
        cipher = Cipher(algorithms.AES(key or os.urandom(KEY_BYTES)), modes.CTR(counter))
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
        drawn = np.empty(count)
        for start in range(0, count, _BLOCK):
            part = drawn[start : start + _BLOCK]
            part[:] = self._normal_pairs((len(part) + 1) // 2)[: len(part)]
        return drawn

    def _normal_pairs(self, pairs: int) -> np.ndarray:
        """Box–Muller on 4 × `pairs` points, [2 · pairs]: cosines and sines, each a sum of four over 2."""
        uniform = torch.from_numpy(self._bits53(8 * pairs)).view(2, 4, pairs)
        radius = uniform[0].add_(1.0).mul_(2.0**-53).log_().mul_(-2.0).sqrt_()
        angle = uniform[1].mul_(2.0**-53 * 2.0 * math.pi)
        both = torch.stack([radius * angle.cos(), radius * angle.sin()])
        return (both.sum(1) / 2.0).flatten().numpy()


def lattice_spacing(clip_norm: float, noise_multiplier: float) -> float:
    """Distance of lattice points: a power of two, 2⁻²⁸ of the mechanism's scale."""
    return 2.0 ** (math.floor(math.log2(max(noise_multiplier, 1.0) * clip_norm)) - _LATTICE_BITS)
