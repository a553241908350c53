"""How much one forward pass may hold on this machine; never part of the mechanism."""

from __future__ import annotations

import psutil
import torch

from common.inference.model_folder import LlamaDimensions
from edge_node.training.batch import PassLimit

_SHARE = 0.5
"""Of the free memory; serving goes on beside training."""

_MOST_ROWS = 64
"""More do not make a pass faster on the machines measured."""


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def bytes_per_token(d: LlamaDimensions, *, value_bytes: int, checkpointing: bool) -> float:
    """Activations that a training pass keeps per token, and its share of the float32 logits.

    The coefficients are fitted to peak memory measured on a 135 M model, and rounded up.
    """
    kept_layers = 2 if checkpointing else d.layers
    per_layer = (16 * d.hidden + 6.5 * d.intermediate) * value_bytes
    between_layers = d.layers * d.hidden * value_bytes
    return kept_layers * per_layer + between_layers + 12.0 * d.vocabulary


def pass_limit(
    free: int, dimensions: LlamaDimensions, *, value_bytes: int = 4, checkpointing: bool = False
) -> PassLimit:
    """The largest pass that fits in half of `free` bytes."""
    per_token = bytes_per_token(dimensions, value_bytes=value_bytes, checkpointing=checkpointing)
    return PassLimit(_MOST_ROWS, max(1, int(free * _SHARE / per_token)))
