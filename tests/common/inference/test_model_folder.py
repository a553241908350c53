import json
import shutil
from pathlib import Path

import pytest

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
    with pytest.raises(ConfigError, match="not JSON"):
        open_model(copy)
    (copy / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="lacks hidden_size"):
        open_model(copy)


def test_the_digest_covers_weights_config_and_tokenizer(copy: Path, model: ModelFolder) -> None:
    assert open_model(copy).digest == model.digest
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        original = (copy / name).read_bytes()
        (copy / name).write_bytes(original + b" ")
        assert open_model(copy).digest != model.digest
        (copy / name).write_bytes(original)
