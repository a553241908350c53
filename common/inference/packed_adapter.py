"""An adapter as inputs of the graph, checked before anything runs on it.

The runtime takes an adapter that lacks tensors, or whose bits have flipped, and
answers with it; so what it is given is complete and finite, or nothing.
"""

from __future__ import annotations

import numpy as np

from common.adapter import PREFIX, Adapter, check_tensors
from common.errors import TrustError
from common.inference.model_folder import TARGET_MODULES, ModelFolder

PROJECTION_GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gu": ("mlp.gate_proj", "mlp.up_proj"),
    "d": ("mlp.down_proj",),
}
"""Projections that the graph runs as one, by the name it gives them."""


def check_adapter(adapter: Adapter, model: ModelFolder) -> None:
    """Every target module of every layer has its two factors, of the right shapes and rank, and finite.

    Raises:
        TrustError: it does not fit the model.
    """
    rank, targets = adapter.shape.rank, adapter.shape.target_modules
    unknown = set(targets) - set(TARGET_MODULES)
    if unknown or not targets:
        raise TrustError(f"the adapter targets {sorted(unknown) or 'nothing'}; targets are {', '.join(TARGET_MODULES)}")
    if rank < 1 or not np.isfinite(adapter.shape.scaling):
        raise TrustError(f"the adapter has rank {rank} and scaling {adapter.shape.scaling}")
    expected: dict[str, tuple[int, ...]] = {}
    for module, (outputs, inputs) in model.module_shapes().items():
        if module.rpartition(".")[2] in targets:
            expected[f"{PREFIX}{module}.lora_A.weight"] = (rank, inputs)
            expected[f"{PREFIX}{module}.lora_B.weight"] = (outputs, rank)
    check_tensors(adapter.tensors, expected)


def graph_inputs(adapter: Adapter, model: ModelFolder, dtype: type[np.floating]) -> dict[str, np.ndarray]:
    """The graph inputs of one adapter: fused A = [A_q | A_k | A_v], block-diagonal B, alpha / rank folded into B.

    Groups that the adapter does not train are left out; the graph's own default for them is nothing.

    Raises:
        TrustError: the adapter does not fit the model, or has values that `dtype` cannot hold.
    """
    check_adapter(adapter, model)
    shapes, inputs = model.module_shapes(), {}
    for layer in range(model.dimensions.layers):
        for group, modules in PROJECTION_GROUPS.items():
            names = [f"model.layers.{layer}.{module}" for module in modules]
            factors = _group(adapter, [(name, shapes[name][0]) for name in names])
            for side, factor in zip("AB", factors or (), strict=False):
                with np.errstate(over="ignore"):
                    cast = np.ascontiguousarray(factor, dtype)
                if not np.isfinite(cast).all():
                    raise TrustError(f"l{layer}.{group}.{side} has a value that {np.dtype(dtype).name} cannot hold")
                inputs[f"l{layer}.{group}.{side}"] = cast
    return inputs


def _group(adapter: Adapter, modules: list[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray] | None:
    """A [in, r·trained] and B [r·trained, out] of the modules of one group; None where none is trained."""
    rank, scaling = adapter.shape.rank, np.float32(adapter.shape.scaling)
    downs: list[np.ndarray] = []
    ups: list[np.ndarray] = []
    trained = sum(f"{PREFIX}{name}.lora_A.weight" in adapter.tensors for name, _ in modules)
    for name, outputs in modules:
        up = np.zeros((rank * trained, outputs), np.float32)
        factor_a = adapter.tensors.get(f"{PREFIX}{name}.lora_A.weight")
        if factor_a is not None:
            first = rank * len(downs)
            up[first : first + rank] = adapter.tensors[f"{PREFIX}{name}.lora_B.weight"].T * scaling
            downs.append(factor_a.T)
        ups.append(up)
    return (np.concatenate(downs, axis=1), np.concatenate(ups, axis=1)) if downs else None
