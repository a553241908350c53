"""Reading a Hugging Face model folder: what is in it, and whether it can be served here.

Takes local folders only; downloading a model is the operator's decision, made
before. Nothing in the folder is executed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from common.errors import ConfigError

EMBEDDED = Path(__file__).parent.parent / "models" / "embedded"
"""The model that is shipped with the package."""


@dataclass(frozen=True)
class _Family:
    """Where an architecture differs from Llama: bias on q, k and v; RMS norm of each head's q and k."""

    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json has none; None for hidden / heads


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LlamaDimensions:
    """Sizes of a Llama-family decoder, and what Qwen2 and Qwen3 add to it.

    Attributes:
        qkv_bias: q, k and v have a bias.
        qk_norm: each head's q and k are normalised before the rotation.
        tied: config.json lets the embeddings be the head.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    norm_epsilon: float
    rope_theta: float
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True


@dataclass(frozen=True)
class ModelFolder:
    """A local model that can be served: its folder, dimensions, end tokens and digest."""

    path: Path
    dimensions: LlamaDimensions
    end_tokens: frozenset[int]
    digest: str

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Weight shape (out, in) of every linear layer LoRA can train, by module path."""
        return _module_shapes(self.dimensions)

    def weights(self) -> dict[str, np.ndarray]:
        """All tensors as float32 by name."""
        tensors: dict[str, np.ndarray] = {}
        for file in _weight_files(self.path):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    tensors[name] = opened.get_tensor(name).float().numpy()
        return tensors


def open_model(path: Path) -> ModelFolder:
    """Check a model folder before anything is built from it.

    Raises:
        ConfigError: a file is missing or damaged, or the architecture is not supported.
    """
    if not path.is_dir():
        raise ConfigError(f"model folder {path} does not exist; give a local Hugging Face folder with --model")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigError(f"model folder {path} has no {name}; is it a complete Hugging Face folder?")
    config = _json_object(path / "config.json")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else "none"
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture} in {path} is not supported; supported: " + ", ".join(SUPPORTED_ARCHITECTURES)
        )
    _refuse_variants(config, path)
    dimensions = _dimensions(config, path, _FAMILIES[architecture])
    files = _weight_files(path)
    _check_weights(files, dimensions)
    described = [path / "config.json", *(path / name for name in _TOKENIZER_FILES if (path / name).is_file())]
    return ModelFolder(path, dimensions, _end_tokens(config, path), _digest([*described, *files]))


def _json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable JSON") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return found


def _refuse_variants(config: dict[str, Any], path: Path) -> None:
    """Options the exported graph does not implement; serving them wrongly would be silent."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default" if isinstance(rope, dict) else "unknown"
    turned = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) if kind == "default" else 1.0
    wrong = [
        option
        for option, unsupported in {
            f"rope_type={kind}": kind != "default",
            f"partial_rotary_factor={turned}": turned not in (None, 1.0),
            "attention_bias": config.get("attention_bias", False),
            "mlp_bias": config.get("mlp_bias", False),
            "use_sliding_window": config.get("use_sliding_window", False)
            or "sliding_attention" in (config.get("layer_types") or ()),
            f"hidden_act={config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
            "quantization_config": "quantization_config" in config,
        }.items()
        if unsupported
    ]
    if wrong:
        raise ConfigError(f"the model in {path} uses {', '.join(wrong)}, which is not supported")


def _dimensions(config: dict[str, Any], path: Path, family: _Family) -> LlamaDimensions:
    def number(name: str, default: Any = None) -> Any:
        value = config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{path / 'config.json'}: {name} is {value!r}, expected a positive number")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError(f"{path / 'config.json'}: rope_theta is {theta!r}, expected a positive number")
    return LlamaDimensions(
        hidden=hidden,
        intermediate=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", family.head_dim or hidden // heads),
        vocabulary=number("vocab_size"),
        context_tokens=number("max_position_embeddings"),
        norm_epsilon=number("rms_norm_eps"),
        rope_theta=float(theta),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied=config.get("tie_word_embeddings", False) is True,
    )


def module_shapes_of_a_layer(d: LlamaDimensions) -> dict[str, tuple[int, int]]:
    """Weight shape (out, in) of each linear module of a layer."""
    attention, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    return {
        "self_attn.q_proj": (attention, d.hidden),
        "self_attn.k_proj": (kv, d.hidden),
        "self_attn.v_proj": (kv, d.hidden),
        "self_attn.o_proj": (d.hidden, attention),
        "mlp.gate_proj": (d.intermediate, d.hidden),
        "mlp.up_proj": (d.intermediate, d.hidden),
        "mlp.down_proj": (d.hidden, d.intermediate),
    }


def _module_shapes(d: LlamaDimensions) -> dict[str, tuple[int, int]]:
    per_layer = module_shapes_of_a_layer(d)
    return {f"model.layers.{layer}.{module}": shape for layer in range(d.layers) for module, shape in per_layer.items()}


def _check_weights(files: list[Path], d: LlamaDimensions) -> None:
    """Every weight the graph needs is there, with its shape, in a floating dtype."""
    expected: dict[str, list[int]] = {f"{m}.weight": list(shape) for m, shape in _module_shapes(d).items()}
    expected |= {"model.embed_tokens.weight": [d.vocabulary, d.hidden], "model.norm.weight": [d.hidden]}
    for layer in range(d.layers):
        p = f"model.layers.{layer}"
        expected |= {f"{p}.{norm}.weight": [d.hidden] for norm in ("input_layernorm", "post_attention_layernorm")}
        if d.qkv_bias:
            expected |= {f"{p}.self_attn.{m}_proj.bias": expected[f"{p}.self_attn.{m}_proj.weight"][:1] for m in "qkv"}
        if d.qk_norm:
            expected |= {f"{p}.self_attn.{m}_norm.weight": [d.head_dim] for m in "qk"}
    head = {"lm_head.weight": [d.vocabulary, d.hidden]}
    optional = head if d.tied else {}  # as transformers does: a head in the file is used even where it could be tied
    expected |= {} if d.tied else head
    for file in files:
        if not file.is_file():
            raise ConfigError(f"model folder {file.parent} has no {file.name}; is it a complete Hugging Face folder?")
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    part = opened.get_slice(name)
                    shape = expected.pop(name, optional.get(name, part.get_shape()))
                    if part.get_shape() != shape or part.get_dtype() not in _DTYPES:
                        raise ConfigError(
                            f"{file}: {name} is {part.get_dtype()} {part.get_shape()}, config.json says {shape}"
                        )
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is not a readable safetensors file; download it again") from error
    if expected:
        raise ConfigError(f"model folder {files[0].parent} has no weight {min(expected)}")


def _end_tokens(config: dict[str, Any], path: Path) -> frozenset[int]:
    """Tokens that end an answer: those of the model and of its generation settings."""
    generation = path / "generation_config.json"
    sources = [config, _json_object(generation)] if generation.is_file() else [config]
    ends: set[int] = set()
    for source in sources:
        end = source.get("eos_token_id")
        ends.update(e for e in (end if isinstance(end, list) else [end]) if isinstance(e, int))
    if not ends:
        raise ConfigError(f"{path / 'config.json'} lacks eos_token_id")
    return frozenset(ends)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    names = _json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index} has no weight_map")
    return [path / Path(str(name)).name for name in sorted(set(names.values()))]


def _digest(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()
