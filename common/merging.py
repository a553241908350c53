"""Adapters of any ranks into one, and one into the weights of its base.

A weighted sum of products BᵢAᵢ is itself a product of the stacked factors, exactly,
of the sum of the ranks. Cutting that back to one rank by its SVD is the best there
is, and what it loses is known and reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.adapter import PREFIX, Adapter, LoraShape, equal_factors
from common.errors import ConfigError, TrustError


@dataclass(frozen=True)
class Recompressed:
    """An adapter of a chosen rank, and how far its products are from the exact sum, relative to the sum's norm."""

    adapter: Adapter
    relative_error: float


def weighted_sum(adapters: Sequence[Adapter], shares: Sequence[float], *, rank: int, alpha: float) -> Recompressed:
    """Σ sᵢ · (αᵢ/rᵢ) BᵢAᵢ as one adapter of `rank`, with factors of equal norm.

    Args:
        adapters: of the same modules; ranks and scalings may differ.
    Raises:
        ConfigError: they have different modules or module shapes, or a factor is not finite.
    """
    names = _common_modules(adapters)
    shape = LoraShape(rank, alpha, adapters[0].shape.target_modules)
    tensors, lost, whole = {}, 0.0, 0.0
    for name_a in names:
        name_b = name_a.replace(".lora_A.", ".lora_B.")
        factors = [share * one.shape.scaling for share, one in zip(shares, adapters, strict=True)]
        b_OR = np.hstack(
            [factor * one.tensors[name_b].astype(np.float64) for factor, one in zip(factors, adapters, strict=True)]
        )
        a_RI = np.vstack([one.tensors[name_a].astype(np.float64) for one in adapters])
        new_b, new_a, missed = equal_factors(b_OR / shape.scaling, a_RI, rank=rank)
        tensors[name_b], tensors[name_a] = new_b, new_a
        lost += missed**2
        whole += float(np.linalg.norm(new_b @ new_a) ** 2) + missed**2
    relative = math.sqrt(lost / whole) if whole else 0.0
    return Recompressed(Adapter(shape, tensors), relative)


def recompressed(adapter: Adapter, *, rank: int) -> Recompressed:
    """The same adapter at another rank, with the scaling it had."""
    return weighted_sum([adapter], [1.0], rank=rank, alpha=adapter.shape.scaling * rank)


def merged_weights(weights: Mapping[str, np.ndarray], adapter: Adapter) -> dict[str, np.ndarray]:
    """W + (α/r) BA for every module of the adapter, the other tensors as they are; float32.

    Raises:
        ConfigError: the base has no such module, or one of another shape.
        TrustError: a merged weight is not finite.
    """
    merged = dict(weights)
    for name_a in adapter.names("A"):
        a_RI = adapter.tensors[name_a].astype(np.float64)
        b_OR = adapter.tensors[name_a.replace(".lora_A.", ".lora_B.")].astype(np.float64)
        name = name_a.removeprefix(PREFIX).replace(".lora_A.weight", ".weight")
        base = weights.get(name)
        if base is None or base.shape != (len(b_OR), a_RI.shape[1]):
            raise ConfigError(f"the adapter's {name} does not fit the base model")
        with np.errstate(over="ignore", invalid="ignore"):
            merged[name] = (base + adapter.shape.scaling * (b_OR @ a_RI)).astype(np.float32)
        if not np.isfinite(merged[name]).all():
            raise TrustError(f"merged into the base, {name} has a value that is not finite")
    return merged


def _common_modules(adapters: Sequence[Adapter]) -> tuple[str, ...]:
    if not adapters:
        raise ConfigError("there is no adapter to combine")
    first = adapters[0]
    for one in adapters:
        if set(one.tensors) != set(first.tensors):
            raise ConfigError("adapters of different modules cannot be combined")
        for name, tensor in one.tensors.items():
            outer = 1 if ".lora_A." in name else 0
            if tensor.shape[outer] != first.tensors[name].shape[outer]:
                raise ConfigError(f"adapters differ in the shape of {name}")
            if not np.isfinite(tensor).all():
                raise ConfigError(f"{name} has a value that is not finite")
    return first.names("A")
