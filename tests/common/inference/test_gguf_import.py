"""GGUF files written here, imported, against the folders they were written from."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from common.errors import ConfigError
from common.inference import gguf_import
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.gguf_import import _PER_LAYER, _WHOLE, import_gguf
from common.inference.model_folder import EMBEDDED, ModelFolder, open_model
from tests.common.inference.test_export import SIZES

ORIGINAL = ChatTokenizer(open_model(EMBEDDED))
MODULES = {theirs: ours for ours, theirs in {**_WHOLE, **_PER_LAYER}.items()}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in MODULES:
        return f"{MODULES[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{MODULES[module]}.{kind}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of q and k."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model: ModelFolder, kind: Kind = Kind.F32, **changes: Any) -> dict[str, np.ndarray]:
    """Write a model folder as GGUF with fields changed (None: left out); returns the weights as its reader has them."""
    config = json.loads((model.path / "config.json").read_text())
    tokenizer = json.loads((model.path / "tokenizer.json").read_text())
    architecture, d = config["model_type"], model.dimensions
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    fields: dict[str, Any] = {
        "block_count": d.layers,
        "context_length": d.context_tokens,
        "embedding_length": d.hidden,
        "feed_forward_length": d.intermediate,
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.kv_heads,
        "attention.key_length": d.head_dim,
        "attention.layer_norm_rms_epsilon": d.norm_epsilon,
        "rope.freq_base": d.rope_theta,
        "rope.dimension_count": d.head_dim,
    }
    fields = {f"{architecture}.{name}": value for name, value in fields.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": (model.path / "chat_template.jinja").read_text(),
    }
    named = changes.pop("architecture", architecture)
    writer = gguf.GGUFWriter(file, named)
    for name, value in {**fields, **changes}.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    kept = {}
    for name, weight in model.weights().items():
        stored = weight
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = permuted(weight, d.heads if "q_proj" in name else d.kv_heads)
        of_kind = kind if weight.ndim == 2 else Kind.F32
        data = gguf.quantize(stored, of_kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=of_kind)
        kept[name] = gguf.dequantize(gguf.quantize(weight, of_kind), of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_an_imported_model_has_exactly_the_files_weights(tmp_path: Path, model: ModelFolder, kind: Kind) -> None:
    kept = write_gguf(tmp_path / "m.gguf", model, kind)
    imported = import_gguf(tmp_path / "m.gguf", tmp_path / "out" / "model")
    assert imported.dimensions == model.dimensions
    assert imported.end_tokens == model.end_tokens
    found = imported.weights()
    assert set(found) == set(kept)
    for name, weight in kept.items():
        np.testing.assert_array_equal(found[name], weight)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model"]  # nothing half-made is left


def test_a_large_model_is_written_in_parts(tmp_path: Path, model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "_SHARD_BYTES", 2**20)
    kept = write_gguf(tmp_path / "m.gguf", model)
    imported = import_gguf(tmp_path / "m.gguf", tmp_path / "model")
    assert len(list(imported.path.glob("model-*.safetensors"))) > 1
    found = imported.weights()
    assert all((found[name] == weight).all() for name, weight in kept.items())
    state = AutoModelForCausalLM.from_pretrained(imported.path).state_dict()
    assert all((state[name].numpy() == weight).all() for name, weight in kept.items())


@cache
def imported_tokenizer() -> ChatTokenizer:
    folder = Path(mkdtemp())
    try:
        write_gguf(folder / "m.gguf", open_model(EMBEDDED))
        return ChatTokenizer(import_gguf(folder / "m.gguf", folder / "model"))
    finally:
        shutil.rmtree(folder)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60))
def test_its_tokenizer_is_the_original(text: str) -> None:
    original, imported = ORIGINAL, imported_tokenizer()
    ids = original.encode_text(text)
    assert imported.encode_text(text) == ids
    assert imported.decode(ids) == original.decode(ids)
    assert set(imported._control_tokens) == set(original._control_tokens)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=32),
    ],
)
def test_qwen_is_imported_without_reordering(tmp_path: Path, config: Any) -> None:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "original")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / file, tmp_path / "original")
    original = open_model(tmp_path / "original")
    kept = write_gguf(tmp_path / "m.gguf", original)
    imported = import_gguf(tmp_path / "m.gguf", tmp_path / "model")
    assert imported.dimensions == original.dimensions
    assert all((imported.weights()[name] == weight).all() for name, weight in kept.items())
    ids = torch.tensor([[5, 60, 70, 8]])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(imported.path).eval()(input_ids=ids).logits
        torch.testing.assert_close(found, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gemma"}, "gemma"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.expert_count": 4}, "experts"),
        ({"split.count": 2}, "several files"),
        ({"llama.rope.dimension_count": 16}, "part of each head"),
        ({"llama.block_count": 5}, "has no weight model.layers.4"),
        ({"llama.block_count": 3}, None),
        ({"llama.embedding_length": None}, "KeyError"),
        ({"llama.attention.head_count": 0}, "cannot be read|num_attention_heads"),
        ({"tokenizer.chat_template": None}, "no chat template"),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id"),
        ({"tokenizer.ggml.tokens": ["a"] * 280}, "not distinct"),
        ({"tokenizer.ggml.merges": ["nope nope"]}, "merges"),
        ({"tokenizer.ggml.eos_token_id": 999}, "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    tmp_path: Path, model: ModelFolder, changes: dict[str, Any], reason: str | None
) -> None:
    write_gguf(tmp_path / "m.gguf", model, **changes)
    if reason is None:  # layers beyond those of the configuration are not used, as transformers does
        assert import_gguf(tmp_path / "m.gguf", tmp_path / "model").dimensions.layers == 3
        return
    with pytest.raises(ConfigError, match=reason):
        import_gguf(tmp_path / "m.gguf", tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_damaged_file_is_refused(tmp_path: Path, model: ModelFolder) -> None:
    write_gguf(tmp_path / "m.gguf", model)
    whole = (tmp_path / "m.gguf").read_bytes()
    rng = np.random.default_rng(0)
    for length in (0, 3, 24, 300, 5000, len(whole) // 2, len(whole) - 10):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            import_gguf(tmp_path / "cut.gguf", tmp_path / "model")
    for _ in range(20):
        damaged = bytearray(whole)
        for place in rng.integers(0, 3000, 3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "cut.gguf").write_bytes(damaged)
        try:
            import_gguf(tmp_path / "cut.gguf", tmp_path / "model")
        except ConfigError:
            assert not (tmp_path / "model").exists()
        else:
            shutil.rmtree(tmp_path / "model")


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "model")
