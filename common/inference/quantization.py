"""Weights in 8 bits: blocks of a row share a scale and a zero point."""

from __future__ import annotations

import numpy as np

BLOCK = 32
_LEVELS = 255


def quantize(weight_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round to the nearest of 256 levels between the least and the greatest value of each block, zero among them.

    Returns:
        levels [O, blocks, 32] uint8, scales [O, blocks] float32 and zero points [O, blocks] uint8, as the runtime's
        MatMulNBits takes them. A row is padded with zeros to whole blocks.
    """
    outputs, inputs = weight_OI.shape
    padded = np.pad(weight_OI, ((0, 0), (0, -inputs % BLOCK))).reshape(outputs, -1, BLOCK)
    greatest, least = np.maximum(padded.max(axis=2), 0), np.minimum(padded.min(axis=2), 0)
    scales = ((greatest - least) / _LEVELS).astype(np.float32)
    scales[scales == 0] = 1.0
    zeros = np.clip(np.rint(-least / scales), 0, _LEVELS)
    levels = np.clip(np.rint(padded / scales[..., None] + zeros[..., None]), 0, _LEVELS)
    return levels.astype(np.uint8), scales, zeros.astype(np.uint8)


def dequantize(levels: np.ndarray, scales: np.ndarray, zeros: np.ndarray, inputs: int) -> np.ndarray:
    """The float32 weight [O, I] that the levels stand for."""
    values = (levels.astype(np.float32) - zeros[..., None]) * scales[..., None]
    return values.reshape(len(levels), -1)[:, :inputs]
