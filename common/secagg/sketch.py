"""A random linear map P of the ring onto a few hundred words, agreed on after all uploads.

Four independent count-sketches: every coordinate has in each table one bucket and
one sign, both from one byte of AES-256-CTR. P(u + v) = P(u) + P(v) modulo 2³², so
the sketch of an update is known from that of its upload and those of its masks,
and E |P u|² = |u|².

Charikar, Chen & Farach-Colton 2002, "Finding frequent items in data streams".
Hashing is independent by coordinate: blocks, or equally filled buckets, have
vectors that they map to zero with probability far above chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.secagg.encoding import digest
from common.secagg.masking import keystream

TABLES = 4
BUCKETS = (128, 64, 32)
"""Buckets of a table, the largest that the dimension allows."""

LARGEST_SHARE = 0.013
"""Words of a sketch per coordinate of the update, at most."""

_CHUNK = 1 << 16
"""So many words below 2³² sum to less than 2⁵³: exact in float64, and they stay in the cache."""


def buckets_for(dimension: int, *, directions: int = 0) -> int:
    """Buckets of each table; 0 where the dimension is too small for a sketch with so many words beside it."""
    return next((count for count in BUCKETS if TABLES * count + directions <= LARGEST_SHARE * dimension), 0)


@dataclass(frozen=True)
class _Table:
    seed: bytes
    table: int


class Sketch:
    """The map that a seed stands for.

    Args:
        seed: 32 bytes that nobody knew when the uploads were made.
        buckets: of each table, a power of two up to 128.
        direction_D: int8, see `common.secagg.direction`; makes one more word, the last.
    """

    def __init__(self, seed: bytes, dimension: int, buckets: int, direction_D: np.ndarray | None = None) -> None:
        if buckets not in BUCKETS:
            raise ValueError(f"{buckets} buckets; known: {BUCKETS}")
        self._dimension, self._buckets = dimension, buckets
        self._direction_D = None if direction_D is None else direction_D.astype(np.float64)
        kept = np.uint8(0x80 | (buckets - 1))  # the top bit is the sign, the low bits are the bucket
        self._bytes_TD = [
            np.frombuffer(keystream(digest(_Table(seed, table)), dimension), np.uint8) & kept for table in range(TABLES)
        ]

    @property
    def hashed(self) -> int:
        """Words from hashing: those whose L2 norm estimates the update's."""
        return TABLES * self._buckets

    @property
    def rows(self) -> int:
        return self.hashed + (self._direction_D is not None)

    def apply(self, words_D: np.ndarray) -> np.ndarray:
        """P of uint32 words, uint32 [rows]."""
        if len(words_D) != self._dimension:
            raise ValueError(f"{len(words_D)} words, the sketch is of {self._dimension}")
        sums_TC, along = np.zeros((TABLES, 256), np.uint64), 0
        for start in range(0, self._dimension, _CHUNK):
            part = words_D[start : start + _CHUNK].astype(np.float64)
            for table, bytes_D in enumerate(self._bytes_TD):
                counted = np.bincount(bytes_D[start : start + _CHUNK], weights=part, minlength=256)
                sums_TC[table] += counted.astype(np.uint64)
            if self._direction_D is not None:
                along += int(np.dot(part, self._direction_D[start : start + _CHUNK]))
        plus_TB, minus_TB = sums_TC[:, : self._buckets], sums_TC[:, 128 : 128 + self._buckets]
        hashed_K = (plus_TB - minus_TB).astype(np.uint32).reshape(-1)
        return hashed_K if self._direction_D is None else np.append(hashed_K, np.uint32(along % 2**32))


def as_floats(words_K: np.ndarray, *, scale: float) -> np.ndarray:
    """The hashed words of a sketch in the update's units, so that their L2 norm estimates the update's; float64."""
    return words_K.view(np.int32) / (scale * np.sqrt(TABLES))
