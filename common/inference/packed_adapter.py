"""An adapter as inputs of the graph, checked before anything runs on it.

The runtime takes an adapter that lacks tensors, or whose bits have flipped, and
answers with it; so what it is given is complete and finite, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from common.adapter import PREFIX, Adapter, check_tensors
from common.errors import TrustError
from common.inference.model_folder import TARGET_MODULES, ModelFolder, module_shapes_of_a_layer

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
    shapes = module_shapes_of_a_layer(model.dimensions)
    inputs: dict[str, np.ndarray] = {}
    with np.errstate(over="ignore"):  # looked for below
        for layer in range(model.dimensions.layers):
            for group, modules in PROJECTION_GROUPS.items():
                prefixes = {f"{PREFIX}model.layers.{layer}.{module}.lora_": shapes[module] for module in modules}
                for side, fused in zip("AB", _fused(adapter, prefixes, dtype), strict=False):
                    inputs[f"l{layer}.{group}.{side}"] = fused
    if dtype != np.float32:
        for name, array in inputs.items():
            if not np.isfinite(array).all():
                raise TrustError(f"{name} has a value that {np.dtype(dtype).name} cannot hold")
    return inputs


def _fused(
    adapter: Adapter, prefixes: Mapping[str, tuple[int, int]], dtype: type[np.floating]
) -> tuple[np.ndarray, ...]:
    """A [in, r·trained] and B [r·trained, out] of one group of projections; nothing where none is trained.

    Args:
        prefixes: of the names of each projection's factors, with the shape (out, in) of its weight.
    """
    trained = [prefix for prefix in prefixes if f"{prefix}A.weight" in adapter.tensors]
    if not trained:
        return ()
    rank, scaling = adapter.shape.rank, np.float32(adapter.shape.scaling)
    down = np.empty((prefixes[trained[0]][1], rank * len(trained)), dtype)
    up = np.zeros((rank * len(trained), sum(outputs for outputs, _ in prefixes.values())), dtype)
    row = column = 0
    for prefix, (outputs, _) in prefixes.items():
        if prefix in trained:
            down[:, row : row + rank] = adapter.tensors[f"{prefix}A.weight"].T
            up[row : row + rank, column : column + outputs] = adapter.tensors[f"{prefix}B.weight"].T * scaling
            row += rank
        column += outputs
    return down, up
