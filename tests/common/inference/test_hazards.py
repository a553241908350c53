"""Four ways in which the runtime answers wrongly without an error, and that our path takes none of them.

Each test shows the hazard in the runtime itself first, so that it says when a new runtime no longer has it.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from safetensors.numpy import load, save

from common.adapter import Adapter, parse_adapter
from common.errors import TrustError
from common.inference.engine import Engine, Lane
from common.inference.model_folder import ModelFolder
from common.inference.packed_adapter import check_adapter, graph_inputs
from tests.conftest import changed

IDS = [2, 40, 50, 60, 70]


@pytest.fixture(scope="module")
def adapter(start: Adapter) -> Adapter:
    return changed(start, seed=1, scale=0.2)


@pytest.fixture(scope="module")
def expected(engine: Engine, adapter: Adapter) -> np.ndarray:
    return ours(engine, adapter)


@pytest.fixture(scope="module")
def base(engine: Engine, start: Adapter) -> np.ndarray:
    return ours(engine, start)


def ours(engine: Engine, adapter: Adapter) -> np.ndarray:
    return Lane(engine, engine.load(adapter)).prefill([IDS])[0].copy()


def feeds(model: ModelFolder) -> dict[str, np.ndarray]:
    d = model.dimensions
    empty = np.zeros((1, d.kv_heads, 0, d.head_dim), np.float32)
    return {
        "input_ids": np.array([IDS]),
        "seqlens_k": np.array([len(IDS) - 1], np.int32),
        "total_seq": np.array(len(IDS), np.int32),
        "logit_idx": np.array([len(IDS) - 1]),
        **{f"past.{layer}.{part}": empty for layer in range(d.layers) for part in "kv"},
    }


def exported(inputs: dict[str, np.ndarray], path: Path) -> Path:
    """The runtime's own adapter file."""
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    file = ort.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters(values)
    file.export_adapter(str(path))
    return path


def opened(path: Path) -> ort.LoraAdapter:
    adapter = ort.LoraAdapter()
    adapter.Load(str(path))
    return adapter


def test_the_runtimes_own_path_agrees_where_nothing_goes_wrong(
    engine: Engine, adapter: Adapter, expected: np.ndarray, base: np.ndarray, tmp_path: Path
) -> None:
    loaded = opened(exported(graph_inputs(adapter, engine.model, np.float32), tmp_path / "a"))
    options = ort.RunOptions()
    options.add_active_adapter(loaded)
    (found,) = engine.session.run(["logits"], feeds(engine.model), options)
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    assert np.abs(expected - base).max() > 0.5


def test_1_run_options_do_not_keep_their_adapter(
    engine: Engine, adapter: Adapter, expected: np.ndarray, tmp_path: Path
) -> None:
    loaded = opened(exported(graph_inputs(adapter, engine.model, np.float32), tmp_path / "a"))
    options = ort.RunOptions()
    options.add_active_adapter(loaded)
    count = ctypes.c_ssize_t.from_address(id(loaded)).value
    other = ort.RunOptions()
    other.add_active_adapter(loaded)
    assert ctypes.c_ssize_t.from_address(id(loaded)).value == count  # a raw pointer: nobody counts the use
    # ours: a lane refers to its adapter, and the adapter to its arrays, as long as either can run
    lane = Lane(engine, engine.load(adapter))
    gc.collect()
    _ = [np.full((256, 256), np.nan, np.float32) for _ in range(200)]
    np.testing.assert_array_equal(lane.prefill([IDS])[0], expected)


def test_2_a_parameter_does_not_keep_its_array(engine: Engine, adapter: Adapter, expected: np.ndarray) -> None:
    array = np.zeros((64, 64), np.float32)
    value = ort.OrtValue.ortvalue_from_numpy(array)
    assert value.data_ptr() == array.ctypes.data  # no copy
    file, alive = ort.AdapterFormat(), weakref.ref(array)
    file.set_parameters({"x": value})
    del value, array
    gc.collect()
    assert alive() is None  # the file's parameter points where its array was
    loaded = engine.load(adapter)
    gc.collect()
    for name, held in loaded.values.items():
        assert held.data_ptr() == loaded._owners[name].ctypes.data  # ours live as long as the values
    np.testing.assert_array_equal(Lane(engine, loaded).prefill([IDS])[0], expected)


def test_3_a_run_with_io_binding_ignores_active_adapters(
    engine: Engine, adapter: Adapter, expected: np.ndarray, base: np.ndarray, tmp_path: Path
) -> None:
    loaded = opened(exported(graph_inputs(adapter, engine.model, np.float32), tmp_path / "a"))
    options = ort.RunOptions()
    options.add_active_adapter(loaded)
    binding = engine.session.io_binding()
    for name, array in feeds(engine.model).items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("logits")
    for output in engine.session.get_outputs()[1:]:
        binding.bind_output(output.name)
    engine.session.run_with_iobinding(binding, options)
    found = binding.copy_outputs_to_cpu()[0][0]
    np.testing.assert_allclose(found, base, atol=1e-4)  # the base model's answer, and no error
    assert np.abs(ours(engine, adapter) - found).max() > 0.5


def test_4_a_part_of_an_adapter_and_a_flipped_bit_are_accepted(
    engine: Engine, adapter: Adapter, expected: np.ndarray, tmp_path: Path
) -> None:
    whole = graph_inputs(adapter, engine.model, np.float32)
    part = {name: array for name, array in whole.items() if not name.startswith("l0.")}
    data = bytearray(exported(whole, tmp_path / "a").read_bytes())
    place = bytes(data).find(whole["l0.qkv.B"].tobytes()[:64]) + 3
    data[place] ^= 0x40
    (tmp_path / "flipped").write_bytes(data)
    for path in (exported(part, tmp_path / "part"), tmp_path / "flipped"):
        options, loaded = ort.RunOptions(), opened(path)
        options.add_active_adapter(loaded)
        (found,) = engine.session.run(["logits"], feeds(engine.model), options)
        assert not np.allclose(found[0], expected, atol=1e-2)  # another answer, and no error


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.lora_B", "layers.3.mlp.down_proj.lora_A"])
def test_4_ours_refuses_an_adapter_that_is_not_whole(engine: Engine, adapter: Adapter, name: str) -> None:
    odd = next(n for n in adapter.tensors if name in n)
    tensors = dict(adapter.tensors)
    broken = {
        "names differ": {n: t for n, t in tensors.items() if n != odd},
        "names differ from": {**tensors, "base_model.model.model.layers.9.x.lora_A.weight": tensors[odd]},
        "has shape": {**tensors, odd: tensors[odd][:, :-1]},
        "not finite": {**tensors, odd: np.full_like(tensors[odd], np.nan)},
    }
    for reason, changed_tensors in broken.items():
        with pytest.raises(TrustError, match=reason):
            engine.load(Adapter(adapter.shape, changed_tensors))


def test_4_ours_refuses_factors_whose_ranks_disagree(engine: Engine, adapter: Adapter) -> None:
    tensors = {n: t[:4] if "lora_A" in n else t for n, t in adapter.tensors.items()}
    with pytest.raises(TrustError, match="has shape"):
        engine.load(Adapter(adapter.shape, tensors))


def test_4_ours_refuses_targets_it_does_not_know(engine: Engine, adapter: Adapter) -> None:
    for targets in ((), ("q_proj", "lm_head")):
        shape = type(adapter.shape)(adapter.shape.rank, adapter.shape.alpha, targets)
        with pytest.raises(TrustError, match="the adapter targets"):
            check_adapter(Adapter(shape, adapter.tensors), engine.model)


def test_4_ours_refuses_every_flipped_bit_of_a_published_file(adapter: Adapter) -> None:
    data = adapter.file_bytes
    assert load(save(load(data), metadata={"format": "pt"})).keys() == adapter.tensors.keys()
    for place in np.random.default_rng(0).integers(0, len(data), 20):
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(place) % 8
        with pytest.raises(TrustError):
            parse_adapter(bytes(flipped), digest=adapter.digest, like=adapter)


def test_values_that_half_precision_cannot_hold_are_refused(model: ModelFolder, adapter: Adapter) -> None:
    name = next(n for n in adapter.tensors if "lora_B" in n)
    large = Adapter(adapter.shape, {**adapter.tensors, name: np.full_like(adapter.tensors[name], 1e6)})
    assert graph_inputs(large, model, np.float32)
    with pytest.raises(TrustError, match="float16 cannot hold"):
        graph_inputs(large, model, np.float16)
