import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from common.errors import ConfigError
from common.inference.model_folder import EMBEDDED, ModelFolder, open_model


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_the_embedded_model_is_what_its_card_says(model: ModelFolder) -> None:
    parameters = sum(tensor.size for tensor in model.weights().values())
    assert 500_000 <= parameters <= 1_000_000
    assert f"{parameters:,} parameters" in (EMBEDDED / "README.md").read_text()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ConfigError, match=name):
        open_model(copy)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_model(tmp_path / "absent")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architecture none"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type=llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_what_the_graph_does_not_implement_is_refused(copy: Path, changes: dict, expected: str) -> None:
    edit(copy, **changes)
    with pytest.raises(ConfigError, match=expected):
        open_model(copy)


def test_a_damaged_config_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        open_model(copy)
    for text, expected in (
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not readable JSON"),
        (json.dumps({"architectures": ["LlamaForCausalLM"]}), "hidden_size is None"),
        (json.dumps({"architectures": "LlamaForCausalLM"}), "architecture none"),
    ):
        (copy / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=expected):
            open_model(copy)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "128"}, "hidden_size is '128'"),
        ({"hidden_size": 256}, "config.json says"),
        ({"num_hidden_layers": 5}, "has no weight model.layers.4"),
        ({"vocab_size": 281}, "embed_tokens"),
        ({"tie_word_embeddings": False}, "has no weight lm_head"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "has no weight model.layers.0.self_attn.k_proj.bias"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "has no weight model.layers.0.self_attn.k_norm"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": None}, "config.json says"),
        ({"eos_token_id": None}, "lacks eos_token_id"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(copy: Path, changes: dict, expected: str) -> None:
    edit(copy, **changes)
    (copy / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=expected):
        open_model(copy)


@pytest.mark.parametrize("data", [b"", b"x" * 100, (EMBEDDED / "model.safetensors").read_bytes()[:-100]])
def test_damaged_weights_are_refused(copy: Path, data: bytes) -> None:
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="not a readable safetensors"):
        open_model(copy)


def test_a_sharded_model_is_read_through_its_index(copy: Path, model: ModelFolder) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, copy / file)
    (copy / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    found, expected = open_model(copy).weights(), model.weights()
    assert all((found[n] == expected[n]).all() for n in expected)
    for broken in ("{", "{}", '{"weight_map": 1}', '{"weight_map": {"x": "absent.safetensors"}}'):
        (copy / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(ConfigError):
            open_model(copy)


def test_bf16_weights_are_read_as_float32_and_every_end_token_counts(copy: Path) -> None:
    tensors = {n: torch.from_numpy(t).bfloat16() for n, t in load_file(copy / "model.safetensors").items()}
    save_torch(tensors, copy / "model.safetensors")
    edit(copy, eos_token_id=[1, 5])
    opened = open_model(copy)
    assert {str(t.dtype) for t in opened.weights().values()} == {"float32"}
    assert opened.end_tokens == {1, 5}


def test_the_digest_covers_weights_config_and_tokenizer(copy: Path, model: ModelFolder) -> None:
    assert open_model(copy).digest == model.digest
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        original = (copy / name).read_bytes()
        (copy / name).write_bytes(original[:-1] + b"\x00" if name.endswith("safetensors") else original + b" ")
        assert open_model(copy).digest != model.digest
        (copy / name).write_bytes(original)
