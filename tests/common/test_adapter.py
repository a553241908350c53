import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from common.adapter import Adapter, initial_adapter, parse_adapter
from common.errors import TrustError
from common.identity import sha256_hex
from common.inference.model_folder import ModelFolder
from tests.conftest import SHAPE, changed


def test_the_initial_adapter_is_the_same_everywhere(model: ModelFolder, start: Adapter) -> None:
    shapes = model.module_shapes()
    backwards = dict(reversed(shapes.items()))
    assert initial_adapter(backwards, SHAPE, seed=0).digest == start.digest
    assert initial_adapter(shapes, SHAPE, seed=1).digest != start.digest
    assert all(not t.any() for n, t in start.tensors.items() if "lora_B" in n)


def test_tensors_cannot_be_changed(start: Adapter) -> None:
    tensor = next(iter(start.tensors.values()))
    with pytest.raises(ValueError):
        tensor[0, 0] = 1.0
    with pytest.raises(TypeError):
        start.tensors["x"] = tensor  # type: ignore[index]


def test_adding_a_flat_change_touches_its_phase_only(start: Adapter) -> None:
    names = start.names("B")
    delta = np.arange(start.flatten(names).size, dtype=np.float32) / 1e5
    after = start.with_added(names, delta)
    np.testing.assert_array_equal(after.flatten(names), delta)
    np.testing.assert_array_equal(after.flatten(start.names("A")), start.flatten(start.names("A")))
    with pytest.raises(ValueError, match="values"):
        start.with_added(names, delta[:-1])
    assert set(start.names("A")) | set(names) == set(start.tensors)
    with pytest.raises(ValueError):
        start.names("C")


def test_a_peft_folder_loads_in_peft_with_the_same_weights(start: Adapter, model: ModelFolder, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = changed(start, seed=1)
    adapter.write_peft_folder(tmp_path, base_model="embedded")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model.path), tmp_path)
    found = {n.replace(".default", ""): p for n, p in loaded.named_parameters() if "lora_" in n}
    assert set(found) == set(adapter.tensors)
    for name, tensor in adapter.tensors.items():
        np.testing.assert_array_equal(found[name].detach().numpy(), tensor)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8
    assert sha256_hex((tmp_path / "adapter_model.safetensors").read_bytes()) == adapter.digest


def _with(adapter: Adapter, name: str, tensor: np.ndarray) -> bytes:
    return save({**{n: np.array(t) for n, t in adapter.tensors.items()}, name: tensor})


def test_foreign_bytes_are_refused_for_the_right_reason(start: Adapter) -> None:
    name = start.names("A")[0]
    good = start.tensors[name]
    not_finite = np.array(good)
    not_finite[0, 0] = np.inf
    without = save({n: np.array(t) for n, t in start.tensors.items() if n != name})
    for data, expected in (
        (b"", "not a safetensors"),
        (b"\x80\x04pickle", "not a safetensors"),
        (start.file_bytes[: len(start.file_bytes) // 2], "not a safetensors"),
        (without, "names differ"),
        (_with(start, "evil", good), "names differ"),
        (_with(start, name, good.astype(np.float64)), "dtype float64"),
        (_with(start, name, good[:, :-1]), "shape"),
        (_with(start, name, not_finite), "not finite"),
    ):
        with pytest.raises(TrustError, match=expected):
            parse_adapter(data, digest=sha256_hex(data), like=start)
    flipped = bytearray(start.file_bytes)
    flipped[-1] ^= 1
    with pytest.raises(TrustError, match="digest"):
        parse_adapter(bytes(flipped), digest=start.digest, like=start)
    assert parse_adapter(start.file_bytes, digest=start.digest, like=start).digest == start.digest
