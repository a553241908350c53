"""Reading a Hugging Face model folder: what is in it, and whether it can be served here.

Takes local folders only; downloading a model is the operator's decision, made
before. Nothing in the folder is executed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from common.errors import ConfigError

EMBEDDED = Path(__file__).parent.parent / "models" / "embedded"
"""The model that is shipped with the package."""

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LlamaDimensions:
    """Sizes of a Llama-family decoder."""

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


@dataclass(frozen=True)
class ModelFolder:
    """A local model that can be served: its folder, dimensions, end token and digest."""

    path: Path
    dimensions: LlamaDimensions
    end_token: int
    digest: str

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Weight shape (out, in) of every linear layer LoRA can train, by module path."""
        d = self.dimensions
        attention = d.heads * d.head_dim
        kv = d.kv_heads * d.head_dim
        per_layer = {
            "self_attn.q_proj": (attention, d.hidden),
            "self_attn.k_proj": (kv, d.hidden),
            "self_attn.v_proj": (kv, d.hidden),
            "self_attn.o_proj": (d.hidden, attention),
            "mlp.gate_proj": (d.intermediate, d.hidden),
            "mlp.up_proj": (d.intermediate, d.hidden),
            "mlp.down_proj": (d.hidden, d.intermediate),
        }
        return {
            f"model.layers.{layer}.{module}": shape for layer in range(d.layers) for module, shape in per_layer.items()
        }

    def weights(self) -> dict[str, np.ndarray]:
        """All tensors as float32 by name."""
        tensors: dict[str, np.ndarray] = {}
        for file in _weight_files(self.path):
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    tensors[name] = opened.get_tensor(name).astype(np.float32)
        return tensors


def open_model(path: Path) -> ModelFolder:
    """Check a model folder before anything is built from it.

    Raises:
        ConfigError: the folder or a file is missing, or the architecture is not supported.
    """
    if not path.is_dir():
        raise ConfigError(f"model folder {path} does not exist; give a local Hugging Face folder with --model")
    needed = [path / "config.json", path / "tokenizer.json", *_weight_files(path)]
    for file in needed:
        if not file.is_file():
            raise ConfigError(f"model folder {path} has no {file.name}; is it a complete Hugging Face folder?")
    try:
        config = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(f"{path / 'config.json'} is not JSON: {error}") from error
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture} in {path} is not supported; supported: " + ", ".join(SUPPORTED_ARCHITECTURES)
        )
    _refuse_variants(config, path)
    try:
        return ModelFolder(path, _dimensions(config), _end_token(config), _digest(needed))
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'} lacks {error.args[0]}") from error


def _refuse_variants(config: dict, path: Path) -> None:
    """Llama options the exported graph does not implement; serving them wrongly would be silent."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    wrong = [
        option
        for option, unsupported in {
            f"rope_type={kind}": kind != "default",
            "attention_bias": config.get("attention_bias", False),
            "mlp_bias": config.get("mlp_bias", False),
            f"hidden_act={config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
            "quantization_config": "quantization_config" in config,
        }.items()
        if unsupported
    ]
    if wrong:
        raise ConfigError(f"the model in {path} uses {', '.join(wrong)}, which is not supported")


def _dimensions(config: dict) -> LlamaDimensions:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return LlamaDimensions(
        hidden=hidden,
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        context_tokens=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
    )


def _end_token(config: dict) -> int:
    end = config["eos_token_id"]
    return end[0] if isinstance(end, list) else end


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    names = set(json.loads(index.read_text())["weight_map"].values())
    return [path / Path(name).name for name in sorted(names)]


def _digest(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()
