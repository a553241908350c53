"""Build the ONNX graph of a Llama-family model, with LoRA adapters as graph inputs.

One fused node per projection group, attention with in-place KV cache and rotary
embedding in the operator, the head at one position a row. Every projection group
`g` of layer `l` takes `l{l}.{g}.A` [in, r] and `.B` [r, out]; their default is
rank 0, whose product is an exact zero, so the base model needs no adapter. The
scaling alpha / rank is folded into B by `adapter_inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from common.adapter import PREFIX, Adapter
from common.inference.model_folder import LlamaDimensions, ModelFolder

PROJECTION_GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gu": ("mlp.gate_proj", "mlp.up_proj"),
    "d": ("mlp.down_proj",),
}

_MICROSOFT = "com.microsoft"
_IR_VERSION = 10
_OPSET = 21


class _Graph:
    """Nodes, initializers, inputs and outputs, collected in order."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def node(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: object
    ) -> str:
        self.nodes.append(
            helper.make_node(operator, inputs, outputs, name=f"{operator}.{outputs[-1]}", domain=domain, **attributes)
        )
        return outputs[0]

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def projection(self, x: str, weight_OI: np.ndarray, name: str) -> str:
        """y = x Wᵀ + (x A) B, with A and B overridable and rank 0 by default."""
        outputs, inputs = weight_OI.shape
        base = self.node("MatMul", [x, self.constant(f"{name}.w", weight_OI.T)], [f"{name}.base"])
        rank = f"r_{name}"
        for side, shape, empty in (("A", [inputs, rank], (inputs, 0)), ("B", [rank, outputs], (0, outputs))):
            self.input(f"{name}.{side}", TensorProto.FLOAT, shape)
            self.constant(f"{name}.{side}", np.zeros(empty, np.float32))
        low = self.node("MatMul", [x, f"{name}.A"], [f"{name}.low"])
        delta = self.node("MatMul", [low, f"{name}.B"], [f"{name}.delta"])
        return self.node("Add", [base, delta], [f"{name}.y"])


def build_graph(model: ModelFolder) -> onnx.ModelProto:
    """The graph of `model` in float32.

    Inputs: input_ids [batch, seq] int64, seqlens_k [batch] int32 (last valid
    position), total_seq [] int32, logit_idx [batch] int64 (which position's logits),
    past.{l}.{k,v} [batch, kv_heads, past, head_dim]. Outputs: logits [batch, vocabulary]
    and present.{l}.{k,v}, which may share the buffers of past.
    """
    d, weights = model.dimensions, model.weights()
    graph = _Graph()
    graph.input("input_ids", TensorProto.INT64, ["batch", "seq"])
    graph.input("seqlens_k", TensorProto.INT32, ["batch"])
    graph.input("total_seq", TensorProto.INT32, [])
    graph.input("logit_idx", TensorProto.INT64, ["batch"])
    cos, sin = _rotary_tables(d)
    graph.constant("cos", cos)
    graph.constant("sin", sin)
    embeddings = weights["model.embed_tokens.weight"]
    graph.constant("embeddings", embeddings)
    residual = graph.node("Gather", ["embeddings", "input_ids"], ["hidden"])
    normed = graph.node(
        "SimplifiedLayerNormalization",
        [residual, graph.constant("l0.norm_in", weights["model.layers.0.input_layernorm.weight"])],
        ["l0.x"],
        epsilon=d.norm_epsilon,
        axis=-1,
        stash_type=1,
    )
    for layer in range(d.layers):
        next_norm = (
            weights[f"model.layers.{layer + 1}.input_layernorm.weight"]
            if layer + 1 < d.layers
            else weights["model.norm.weight"]
        )
        normed, residual = _decoder_layer(graph, d, weights, layer, normed, residual, next_norm)
    graph.constant("last_axis", np.array([1], np.int64))
    index = graph.node("Unsqueeze", ["logit_idx", "last_axis"], ["logit_position"])
    last = graph.node("GatherND", [normed, index], ["last_hidden"], batch_dims=1)
    head = weights.get("lm_head.weight")
    matrix = "embeddings" if head is None else graph.constant("head", head)
    graph.node("FusedMatMul", [last, matrix], ["logits"], _MICROSOFT, transB=1)
    graph.outputs.insert(0, helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", d.vocabulary]))
    return helper.make_model(
        helper.make_graph(graph.nodes, "llama", graph.inputs, graph.outputs, graph.initializers),
        ir_version=_IR_VERSION,
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(_MICROSOFT, 1)],
        producer_name="headwater",
    )


def _decoder_layer(
    graph: _Graph,
    d: LlamaDimensions,
    weights: dict[str, np.ndarray],
    layer: int,
    normed: str,
    residual: str,
    next_norm: np.ndarray,
) -> tuple[str, str]:
    """One attention and MLP block; returns the next normed input and the residual stream."""
    p = f"l{layer}"

    def weight(group: str) -> np.ndarray:
        return np.concatenate([weights[f"model.layers.{layer}.{module}.weight"] for module in PROJECTION_GROUPS[group]])

    cache_shape: list[int | str] = ["batch", d.kv_heads, "past", d.head_dim]
    past = [graph.input(f"past.{layer}.{part}", TensorProto.FLOAT, cache_shape) for part in "kv"]
    present = [f"present.{layer}.{part}" for part in "kv"]
    for name in present:
        graph.output(name, TensorProto.FLOAT, ["batch", d.kv_heads, "total", d.head_dim])
    qkv = graph.projection(normed, weight("qkv"), f"{p}.qkv")
    attention = graph.node(
        "GroupQueryAttention",
        [qkv, "", "", *past, "seqlens_k", "total_seq", "cos", "sin"],
        [f"{p}.attention", *present],
        _MICROSOFT,
        num_heads=d.heads,
        kv_num_heads=d.kv_heads,
        scale=d.head_dim**-0.5,
        do_rotary=1,
        rotary_interleaved=0,
    )
    attended = graph.projection(attention, weight("o"), f"{p}.o")
    post_norm = weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
    middle, residual = _add_and_norm(graph, d, residual, attended, f"{p}.mid", post_norm)
    gate_up = graph.projection(middle, weight("gu"), f"{p}.gu")
    gate, up = f"{p}.gate", f"{p}.up"
    graph.node("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
    silu = graph.node("QuickGelu", [gate], [f"{p}.silu"], _MICROSOFT, alpha=1.0)
    product = graph.node("Mul", [silu, up], [f"{p}.product"])
    down = graph.projection(product, weight("d"), f"{p}.d")
    return _add_and_norm(graph, d, residual, down, f"{p}.out", next_norm)


def _add_and_norm(
    graph: _Graph, d: LlamaDimensions, residual: str, branch: str, name: str, scale: np.ndarray
) -> tuple[str, str]:
    normed, total = f"{name}.x", f"{name}.residual"
    graph.node(
        "SkipSimplifiedLayerNormalization",
        [residual, branch, graph.constant(f"{name}.norm", scale)],
        [normed, "", "", total],
        _MICROSOFT,
        epsilon=d.norm_epsilon,
    )
    return normed, total


def _rotary_tables(d: LlamaDimensions) -> tuple[np.ndarray, np.ndarray]:
    frequencies = 1.0 / d.rope_theta ** (np.arange(0, d.head_dim, 2) / d.head_dim)
    angles = np.arange(d.context_tokens)[:, None] * frequencies[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def adapter_inputs(adapter: Adapter, dimensions: LlamaDimensions) -> dict[str, np.ndarray]:
    """The graph inputs of one adapter: fused A = [A_q | A_k | A_v], block-diagonal B, scaling folded in."""
    rank = adapter.shape.rank
    inputs: dict[str, np.ndarray] = {}
    for layer in range(dimensions.layers):
        for group, modules in PROJECTION_GROUPS.items():
            factors = [
                tuple(adapter.tensors[f"{PREFIX}model.layers.{layer}.{module}.lora_{side}.weight"] for side in "AB")
                for module in modules
            ]
            down = np.concatenate([a.T for a, _ in factors], axis=1)
            up = np.zeros((rank * len(factors), sum(b.shape[0] for _, b in factors)), np.float32)
            row = column = 0
            for _, b in factors:
                up[row : row + rank, column : column + b.shape[0]] = b.T * np.float32(adapter.shape.scaling)
                row, column = row + rank, column + b.shape[0]
            inputs[f"l{layer}.{group}.A"] = np.ascontiguousarray(down)
            inputs[f"l{layer}.{group}.B"] = up
    return inputs
