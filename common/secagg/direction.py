"""A direction of the server's own choice, along which each update is projected once beside its sketch.

Small whole numbers, so that the projection is exact modulo 2³² and linear in the
words: it is known from that of the upload and those of its masks. Its length is at
most √D; with |<u, v>| ≤ |u| √D the ring has room for it (`common.secagg.ring`). The
server commits to it before the sites agree on the uploads, and shows it afterwards.
"""

from __future__ import annotations

import hashlib

import numpy as np

from common.errors import TrustError

LARGEST = 16
"""Of a coordinate: 2¹⁶ of them times words below 2³² sum to at most 2⁵², exact in float64."""

_SHRINK = 0.95


def rounded(vector_D: np.ndarray) -> np.ndarray:
    """The direction of a vector of floats, int8; all zeros where it has none.

    What is more than 16 times as large as is usual is cut.

    Raises:
        ValueError: a value is not finite.
    """
    usual = float(np.sqrt(np.mean(np.square(vector_D, dtype=np.float64))))
    if not np.isfinite(usual):
        raise ValueError("a direction of values that are not finite")
    scale = 1 / usual if usual else 0.0
    while True:
        rounded_D = np.clip(np.rint(vector_D * scale), -LARGEST, LARGEST).astype(np.int8)
        if length(rounded_D) <= np.sqrt(len(rounded_D)):
            return rounded_D
        scale *= _SHRINK


def length(direction_D: np.ndarray) -> float:
    """L2 norm."""
    return float(np.sqrt(np.sum(np.square(direction_D, dtype=np.int64))))


def commitment(direction_D: np.ndarray) -> bytes:
    return hashlib.sha256(direction_D.tobytes()).digest()


def read(data: bytes, *, dimension: int, committed: bytes) -> np.ndarray:
    """The direction the server committed to; raises TrustError where it is another one, or none that fits the ring."""
    direction_D = np.frombuffer(data, np.int8)
    for holds, reason in (
        (hashlib.sha256(data).digest() == committed, "the direction is not the one the server committed to"),
        (len(direction_D) == dimension, f"the direction has {len(direction_D)} values, the update {dimension}"),
        (len(direction_D) == 0 or int(np.max(np.abs(direction_D.astype(np.int16)))) <= LARGEST, "it is too large"),
        (length(direction_D) <= np.sqrt(dimension), "the direction is too long for the ring"),
    ):
        if not holds:
            raise TrustError(reason)
    return direction_D
