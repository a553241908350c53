"""An adapter as inputs of the graph, checked before anything runs on it.

The runtime takes an adapter that lacks tensors, or whose bits have flipped, and
answers with it; so what it is given is complete and finite, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from common.adapter import PREFIX, Adapter, LoraShape, all_finite, check_shapes, check_tensors
from common.errors import TrustError
from common.inference.model_folder import TARGET_MODULES, ModelFolder, module_shapes_of_a_layer

PROJECTION_GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gu": ("mlp.gate_proj", "mlp.up_proj"),
    "d": ("mlp.down_proj",),
}
"""Projections that the graph runs as one, by the name it gives them."""


Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class _Group:
    """Projections of one layer that the graph runs as one, at least one of them trained.

    Attributes:
        name: of its inputs in the graph.
        columns: where the outputs of each trained projection begin, by the prefix of its factors' names.
    """

    name: str
    inputs: int
    outputs: int
    columns: Mapping[str, int]


def check_adapter(adapter: Adapter, model: ModelFolder) -> None:
    """Every target module of every layer has its two factors, of the right shapes and rank, and finite.

    Raises:
        TrustError: it does not fit the model.
    """
    check_tensors(adapter.tensors, _expected(adapter.shape, model))


def graph_inputs(adapter: Adapter, model: ModelFolder, dtype: type[np.floating]) -> dict[str, np.ndarray]:
    """The graph inputs of one adapter: fused A = [A_q | A_k | A_v], block-diagonal B, alpha / rank folded into B.

    Groups that the adapter does not train are left out; the graph's own default for them is nothing.
    All are views into two arrays, which are faster to get, to scale and to look through than hundreds.

    Raises:
        TrustError: the adapter does not fit the model, or has values that `dtype` cannot hold.
    """
    check_shapes(adapter.tensors, _expected(adapter.shape, model))
    rank, groups = adapter.shape.rank, _trained_groups(adapter.shape, model)
    down_shapes = {f"{g.name}.A": (g.inputs, rank * len(g.columns)) for g in groups}
    up_shapes = {f"{g.name}.B": (rank * len(g.columns), g.outputs) for g in groups}
    down = np.empty(sum(map(math.prod, down_shapes.values())), np.float32)  # A leaves no gap
    up = np.zeros(sum(map(math.prod, up_shapes.values())), np.float32)
    downs, ups = _cut(down, down_shapes), _cut(up, up_shapes)
    for group in groups:
        for place, (prefix, column) in enumerate(group.columns.items()):
            rows, factor_OR = slice(place * rank, (place + 1) * rank), adapter.tensors[f"{prefix}B.weight"]
            downs[f"{group.name}.A"][:, rows] = adapter.tensors[f"{prefix}A.weight"].T
            ups[f"{group.name}.B"][rows, column : column + len(factor_OR)] = factor_OR.T
    with np.errstate(over="ignore"):  # looked for below
        up *= np.float32(adapter.shape.scaling)
        down, up = down.astype(dtype, copy=False), up.astype(dtype, copy=False)
    inputs = {**_cut(down, down_shapes), **_cut(up, up_shapes)}
    if not (all_finite(down) and all_finite(up)):
        check_adapter(adapter, model)
        odd = next(name for name, array in inputs.items() if not np.isfinite(array).all())
        raise TrustError(f"{odd} has a value that {np.dtype(dtype).name} cannot hold")
    return inputs


def _expected(shape: LoraShape, model: ModelFolder) -> Shapes:
    """Shapes of an adapter's tensors on this model. Raises TrustError where it can have no such adapter."""
    unknown = set(shape.target_modules) - set(TARGET_MODULES)
    if unknown or not shape.target_modules:
        raise TrustError(f"the adapter targets {sorted(unknown) or 'nothing'}; targets are {', '.join(TARGET_MODULES)}")
    if shape.rank < 1 or not np.isfinite(shape.scaling):
        raise TrustError(f"the adapter has rank {shape.rank} and scaling {shape.scaling}")
    expected: Shapes = {}
    for module, (outputs, inputs) in model.module_shapes().items():
        if module.rpartition(".")[2] in shape.target_modules:
            expected[f"{PREFIX}{module}.lora_A.weight"] = (shape.rank, inputs)
            expected[f"{PREFIX}{module}.lora_B.weight"] = (outputs, shape.rank)
    return expected


def _trained_groups(shape: LoraShape, model: ModelFolder) -> list[_Group]:
    layer_shapes = module_shapes_of_a_layer(model.dimensions)
    groups = []
    for group, modules in PROJECTION_GROUPS.items():
        columns, column = {}, 0
        for module in modules:
            if module.rpartition(".")[2] in shape.target_modules:
                columns[module] = column
            column += layer_shapes[module][0]
        inputs = layer_shapes[modules[0]][1]
        for layer in range(model.dimensions.layers if columns else 0):
            prefixes = {f"{PREFIX}model.layers.{layer}.{module}.lora_": at for module, at in columns.items()}
            groups.append(_Group(f"l{layer}.{group}", inputs, column, prefixes))
    return groups


def _cut(array: np.ndarray, shapes: Shapes) -> dict[str, np.ndarray]:
    """Views of these shapes into an array, one after the other."""
    views, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        views[name] = array[begin:end].reshape(shape)
        begin = end
    return views
