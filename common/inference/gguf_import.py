"""A GGUF file as a model folder: exact dequantised weights, configuration, tokenizer and chat template.

Weights are dequantised to float32, which every quantised format of GGUF fits in
exactly, so that what is served and trained is what the file holds. The file is
read, never executed; what it asks for beyond the supported families is refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file

from common.errors import ConfigError
from common.inference.gguf_tokenizer import write_tokenizer
from common.inference.model_folder import ModelFolder, open_model

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SHARD_BYTES = 2**30


def import_gguf(path: Path, folder: Path) -> ModelFolder:
    """Write the model in `path` as the new folder `folder`, which appears whole or not at all.

    Raises:
        ConfigError: the file is damaged or holds a model that is not supported, or `folder` exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; give a new folder")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever the library makes of a foreign file
        raise ConfigError(f"{path} is not a readable GGUF file: {type(error).__name__}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        try:
            fields = {name: field.contents() for name, field in reader.fields.items()}
            _write_config(fields, reader.tensors, made)
            _write_weights(fields, reader.tensors, made)
            write_tokenizer(fields, path, made)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}"[:300]) from error
        open_model(made)
        shutil.move(made, folder)
    return open_model(folder)


def _write_config(fields: dict[str, Any], tensors: list[ReaderTensor], folder: Path) -> None:
    found = fields.get("general.architecture")
    if found not in _ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {found!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")
    architecture, model_type = _ARCHITECTURES[found]
    names = {tensor.name for tensor in tensors}
    scaling = fields.get(f"{found}.rope.scaling.type", "none")
    for what, is_there in {
        f"rope scaling {scaling!r}": scaling != "none",
        "rope scaling": "rope_freqs.weight" in names,
        "experts": bool(fields.get(f"{found}.expert_count", 0)),
        "several files": fields.get("split.count", 1) > 1,
    }.items():
        if is_there:
            raise ConfigError(f"the GGUF model uses {what}, which is not supported")

    def value(key: str, default: Any = None) -> Any:
        return fields[f"{found}.{key}"] if default is None else fields.get(f"{found}.{key}", default)

    hidden, heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length", hidden // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("the GGUF model rotates a part of each head, which is not supported")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(value("rope.freq_base", 10000.0))},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }
    if model_type != "qwen2":
        config |= {"attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ends = {fields["tokenizer.ggml.eos_token_id"], fields.get("tokenizer.ggml.eot_token_id")} - {None}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}) + "\n", encoding="utf-8")


def _shortest(value: float) -> float:
    """The decimal that a float32 of the file was written from."""
    return float(str(np.float32(value)))


def _write_weights(fields: dict[str, Any], tensors: list[ReaderTensor], folder: Path) -> None:
    """Every tensor as float32 in files of about a gigabyte, so that no more is in memory at once."""
    total = sum(int(np.prod(tensor.shape)) * 4 for tensor in tensors)
    count = -(-total // _SHARD_BYTES)
    held: dict[str, np.ndarray] = {}
    places: dict[str, str] = {}

    def write() -> None:
        done = len(set(places.values()))
        name = "model.safetensors" if count == 1 else f"model-{done + 1:05d}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(held, name))
        held.clear()

    for name, array in _arrays(fields, tensors):
        held[name] = array
        if count > 1 and sum(a.nbytes for a in held.values()) >= _SHARD_BYTES:
            write()
    if held:
        write()
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _arrays(fields: dict[str, Any], tensors: list[ReaderTensor]) -> Iterator[tuple[str, np.ndarray]]:
    found = fields["general.architecture"]
    heads = fields[f"{found}.attention.head_count"]
    kv_heads = fields.get(f"{found}.attention.head_count_kv", heads)
    for tensor in tensors:
        try:
            array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise ConfigError(f"{tensor.name} is in {tensor.tensor_type.name}, which cannot be read") from error
        if not np.isfinite(array).all():
            raise ConfigError(f"{tensor.name} has a value that is not finite")
        name = _hugging_face_name(tensor.name)
        if found == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _unpermuted(array, heads if "q_proj" in name else kv_heads)
        yield name, np.ascontiguousarray(array)


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the order of rows that llama.cpp's rotation of neighbours needs; ours rotates halves."""
    return weight.reshape(heads, len(weight) // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, module = rest.partition(".")
    if prefix != "blk" or module not in _PER_LAYER or not layer.isdigit():
        raise ConfigError(f"the GGUF model has a tensor {name}, which is not supported")
    return f"model.layers.{int(layer)}.{_PER_LAYER[module]}.{kind}"
