"""A merged model is what base and adapter were, by the libraries of other people."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.adapter import Adapter, LoraShape
from common.errors import ConfigError, TrustError
from common.inference.model_folder import ModelFolder, open_model
from common.merging import recompressed
from deploy.merge import LARGEST_DIFFERENCE, merge, read_adapter
from tests.conftest import changed
from tests.deploy.conftest import Headwater


@pytest.fixture
def adapter_folder(start: Adapter, tmp_path: Path) -> Path:
    changed(start, seed=1).write_peft_folder(tmp_path / "adapter", base_model="embedded")
    return tmp_path / "adapter"


def test_the_merged_folder_loads_and_computes_the_same(
    headwater: Headwater, model: ModelFolder, adapter_folder: Path, tmp_path: Path
) -> None:
    run = headwater("model", "merge", str(adapter_folder), str(tmp_path / "merged"))
    assert run.returncode == 0, run.stderr
    assert "the same to" in run.stdout
    made = open_model(tmp_path / "merged")
    assert made.digest != model.digest
    assert made.dimensions == model.dimensions
    before, after = model.weights(), made.weights()
    moved = [name for name in before if not np.array_equal(before[name], after[name])]
    assert moved
    assert all(name.endswith("_proj.weight") for name in moved)


def test_a_merge_that_went_wrong_is_noticed_and_leaves_nothing(
    model: ModelFolder, adapter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.merge.merged_weights", lambda weights, adapter: dict(weights))
    with pytest.raises(TrustError, match="logits differ"):
        merge(model, adapter_folder, tmp_path / "merged")
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_recompressed_adapter_loads_in_peft_and_is_as_close_as_it_says(
    model: ModelFolder, start: Adapter, tmp_path: Path
) -> None:
    smaller = recompressed(changed(start, seed=1), rank=16)
    smaller.adapter.write_peft_folder(tmp_path / "other", base_model="embedded")
    assert smaller.relative_error < 1e-6
    assert merge(model, tmp_path / "other", tmp_path / "merged") <= LARGEST_DIFFERENCE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"r": 4}, "does not fit"),
        ({"r": 0}, "r = 0"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "does not fit"),
        ({"lora_alpha": None}, "no PEFT adapter"),
    ],
)
def test_what_is_no_plain_adapter_of_the_model_is_refused(
    model: ModelFolder, adapter_folder: Path, change: dict[str, object], expected: str
) -> None:
    file = adapter_folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=expected):
        read_adapter(adapter_folder, model)


def test_an_adapter_is_read_as_it_was_written(model: ModelFolder, start: Adapter, adapter_folder: Path) -> None:
    found = read_adapter(adapter_folder, model)
    assert found.digest == changed(start, seed=1).digest
    assert isinstance(found.shape, LoraShape)
    (adapter_folder / "adapter_model.safetensors").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="no PEFT adapter"):
        read_adapter(adapter_folder, model)
