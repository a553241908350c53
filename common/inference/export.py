"""Build the ONNX graph of a Llama-family model, with LoRA adapters as graph inputs.

One fused node per projection group, attention with in-place KV cache and rotary
embedding in the operator, the head at one position a row. Every projection group
`g` of layer `l` takes `l{l}.{g}.A` [in, r] and `.B` [r, out]; their default is
rank 0, whose product is an exact zero, so the base model needs no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from common.inference.model_folder import LlamaDimensions, ModelFolder
from common.inference.packed_adapter import PROJECTION_GROUPS
from common.inference.quantization import BLOCK, quantize

Precision = Literal["float32", "int8", "float16"]
"""`int8`: the base's matrices in 8 bits, everything else in float32; `float16`: everything, logits apart."""

_MICROSOFT = "com.microsoft"
_IR_VERSION = 10
_OPSET = 21
_DATA_FILE = "weights.bin"
_LARGE_BYTES = 1024
_PAGE_BYTES = 4096
_INT8_ACTIVATIONS = 4
"""The runtime's `accuracy_level`; without it 8-bit products are computed from dequantised weights, 26 times slower."""


def dtype_of(precision: Precision) -> type[np.floating]:
    """Of activations, adapters and the KV cache."""
    return np.float16 if precision == "float16" else np.float32


@dataclass
class _Graph:
    """Nodes, initializers, inputs and outputs, collected in order; large constants go to `data`."""

    data: BinaryIO
    precision: Precision
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    @property
    def kind(self) -> int:
        """The element type of activations."""
        return TensorProto.FLOAT16 if self.precision == "float16" else TensorProto.FLOAT

    def node(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: object
    ) -> str:
        self.nodes.append(
            helper.make_node(operator, inputs, outputs, name=f"{operator}.{outputs[-1]}", domain=domain, **attributes)
        )
        return outputs[0]

    def constant(self, name: str, value: np.ndarray) -> str:
        """A named constant as it is, or in the graph's float type."""
        if value.dtype == np.float32:
            value = value.astype(dtype_of(self.precision), copy=False)
        value = np.ascontiguousarray(value)
        if value.nbytes < _LARGE_BYTES:
            self.initializers.append(numpy_helper.from_array(value, name))
            return name
        self.data.write(b"\0" * (-self.data.tell() % _PAGE_BYTES))
        tensor = TensorProto(name=name, dims=value.shape, data_type=helper.np_dtype_to_tensor_dtype(value.dtype))
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": _DATA_FILE, "offset": str(self.data.tell()), "length": str(value.nbytes)}
        for key, text in place.items():
            tensor.external_data.add(key=key, value=text)
        self.data.write(value.data)
        self.initializers.append(tensor)
        return name

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def linear(self, x: str, weight_OI: np.ndarray, name: str, result: str) -> str:
        """x Wᵀ of a base weight, in 8 bits where the precision says so."""
        if self.precision != "int8":
            return self.node("MatMul", [x, self.constant(f"{name}.w", weight_OI.T)], [result])
        parts = zip(("q", "scale", "zero"), quantize(weight_OI), strict=True)
        return self.node(
            "MatMulNBits",
            [x, *(self.constant(f"{name}.{part}", array) for part, array in parts)],
            [result],
            _MICROSOFT,
            K=weight_OI.shape[1],
            N=weight_OI.shape[0],
            bits=8,
            block_size=BLOCK,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def projection(self, x: str, weight_OI: np.ndarray, name: str, bias_O: np.ndarray | None = None) -> str:
        """y = x Wᵀ + b + (x A) B, with A and B overridable and rank 0 by default."""
        outputs, inputs = weight_OI.shape
        base = self.linear(x, weight_OI, name, f"{name}.base")
        if bias_O is not None:
            base = self.node("Add", [base, self.constant(f"{name}.bias", bias_O)], [f"{name}.biased"])
        rank = f"r_{name}"
        for side, shape, empty in (("A", [inputs, rank], (inputs, 0)), ("B", [rank, outputs], (0, outputs))):
            self.input(f"{name}.{side}", self.kind, shape)
            self.constant(f"{name}.{side}", np.zeros(empty, np.float32))
        low = self.node("MatMul", [x, f"{name}.A"], [f"{name}.low"])
        delta = self.node("MatMul", [low, f"{name}.B"], [f"{name}.delta"])
        return self.node("Add", [base, delta], [f"{name}.y"])

    def norm(self, x: str, scale: np.ndarray, name: str, epsilon: float) -> str:
        """RMS norm over the last axis."""
        inputs = [x, self.constant(f"{name}.scale", scale)]
        return self.node("SimplifiedLayerNormalization", inputs, [name], epsilon=epsilon, axis=-1, stash_type=1)


def build_graph(model: ModelFolder, folder: Path, *, precision: Precision, context_tokens: int) -> Path:
    """Write the graph of `model` into `folder`; returns its file, beside which its weights lie.

    Inputs: input_ids [batch, seq] int64, seqlens_k [batch] int32 (last valid
    position), total_seq [] int32, logit_idx [batch] int64 (which position's logits),
    past.{l}.{k,v} [batch, kv_heads, past, head_dim]. Outputs: logits [batch, vocabulary]
    float32 and present.{l}.{k,v}, which may share the buffers of past.
    """
    d, weights = model.dimensions, model.weights()
    with (folder / _DATA_FILE).open("wb") as data:
        graph = _Graph(data, precision)
        graph.input("input_ids", TensorProto.INT64, ["batch", "seq"])
        graph.input("seqlens_k", TensorProto.INT32, ["batch"])
        graph.input("total_seq", TensorProto.INT32, [])
        graph.input("logit_idx", TensorProto.INT64, ["batch"])
        cos, sin = _rotary_tables(d, context_tokens)
        graph.constant("cos", cos)
        graph.constant("sin", sin)
        graph.constant("embeddings", weights["model.embed_tokens.weight"])
        residual = graph.node("Gather", ["embeddings", "input_ids"], ["hidden"])
        normed = graph.norm(residual, weights["model.layers.0.input_layernorm.weight"], "l0.x", d.norm_epsilon)
        for layer in range(d.layers):
            normed, residual = _decoder_layer(graph, d, weights, layer, normed, residual)
        _head(graph, d, weights, normed)
    found = helper.make_model(
        helper.make_graph(graph.nodes, "decoder", graph.inputs, graph.outputs, graph.initializers),
        ir_version=_IR_VERSION,
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(_MICROSOFT, 1)],
        producer_name="headwater",
    )
    file = folder / "model.onnx"
    file.write_bytes(found.SerializeToString())
    return file


def _head(graph: _Graph, d: LlamaDimensions, weights: Mapping[str, np.ndarray], normed: str) -> None:
    graph.constant("last_axis", np.array([1], np.int64))
    index = graph.node("Unsqueeze", ["logit_idx", "last_axis"], ["logit_position"])
    last = graph.node("GatherND", [normed, index], ["last_hidden"], batch_dims=1)
    untied = weights.get("lm_head.weight")
    if graph.precision == "int8":
        matrix = weights["model.embed_tokens.weight"] if untied is None else untied
        raw = graph.linear(last, matrix, "head", "raw_logits")
    else:
        name = "embeddings" if untied is None else graph.constant("head", untied)
        raw = graph.node("FusedMatMul", [last, name], ["raw_logits"], _MICROSOFT, transB=1)
    graph.node("Cast", [raw], ["logits"], to=TensorProto.FLOAT)
    graph.outputs.insert(0, helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", d.vocabulary]))


def _decoder_layer(
    graph: _Graph, d: LlamaDimensions, weights: Mapping[str, np.ndarray], layer: int, normed: str, residual: str
) -> tuple[str, str]:
    """One decoder layer; takes and returns (input after its norm, residual stream)."""
    p, stored = f"l{layer}", f"model.layers.{layer}"

    def fused(group: str, part: str = "weight") -> np.ndarray:
        return np.concatenate([weights[f"{stored}.{module}.{part}"] for module in PROJECTION_GROUPS[group]])

    bias = fused("qkv", "bias") if d.qkv_bias else None
    qkv = graph.projection(normed, fused("qkv"), f"{p}.qkv", bias)
    attended = graph.projection(_attention(graph, d, weights, layer, qkv), fused("o"), f"{p}.o")
    post_norm = weights[f"{stored}.post_attention_layernorm.weight"]
    middle, residual = _add_and_norm(graph, d, residual, attended, f"{p}.mid", post_norm)
    gate_up = graph.projection(middle, fused("gu"), f"{p}.gu")
    gate, up = f"{p}.gate", f"{p}.up"
    graph.node("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
    silu = graph.node("QuickGelu", [gate], [f"{p}.silu"], _MICROSOFT, alpha=1.0)
    product = graph.node("Mul", [silu, up], [f"{p}.product"])
    down = graph.projection(product, fused("d"), f"{p}.d")
    last = layer + 1 == d.layers
    following = weights["model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"]
    return _add_and_norm(graph, d, residual, down, f"{p}.out", following)


def _attention(graph: _Graph, d: LlamaDimensions, weights: Mapping[str, np.ndarray], layer: int, qkv: str) -> str:
    p = f"l{layer}"
    past = [graph.input(f"past.{layer}.{part}", graph.kind, ["batch", d.kv_heads, "past", d.head_dim]) for part in "kv"]
    present = [f"present.{layer}.{part}" for part in "kv"]
    for name in present:
        graph.output(name, graph.kind, ["batch", d.kv_heads, "total", d.head_dim])
    packed = [qkv, "", ""]
    if d.qk_norm:
        widths = np.array([d.heads, d.kv_heads, d.kv_heads], np.int64) * d.head_dim
        packed = [f"{p}.q", f"{p}.k", f"{p}.v"]
        graph.node("Split", [qkv, graph.constant(f"{p}.widths", widths)], packed, axis=-1)
        for index, (part, heads) in enumerate((("q", d.heads), ("k", d.kv_heads))):
            by_head = graph.constant(f"{p}.{part}.by_head", np.array([0, 0, heads, d.head_dim], np.int64))
            flat = graph.constant(f"{p}.{part}.flat", np.array([0, 0, heads * d.head_dim], np.int64))
            split = graph.node("Reshape", [packed[index], by_head], [f"{p}.{part}.heads"])
            scale = weights[f"model.layers.{layer}.self_attn.{part}_norm.weight"]
            normed = graph.norm(split, scale, f"{p}.{part}.norm", d.norm_epsilon)
            packed[index] = graph.node("Reshape", [normed, flat], [f"{p}.{part}.normed"])
    return graph.node(
        "GroupQueryAttention",
        [*packed, *past, "seqlens_k", "total_seq", "cos", "sin"],
        [f"{p}.attention", *present],
        _MICROSOFT,
        num_heads=d.heads,
        kv_num_heads=d.kv_heads,
        scale=d.head_dim**-0.5,
        do_rotary=1,
        rotary_interleaved=0,
    )


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


def _rotary_tables(d: LlamaDimensions, context_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    frequencies = 1.0 / d.rope_theta ** (np.arange(0, d.head_dim, 2) / d.head_dim)
    angles = np.arange(context_tokens)[:, None] * frequencies[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
