import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from common.adapter import PREFIX, Adapter, LoraShape, all_finite, initial_adapter, parse_adapter
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
        (_with(start, name, good.T), "shape"),
        (start.file_bytes.replace(b"lora_A", b"lora_Z", 1), "names differ"),
        (start.file_bytes.replace(b'"F32"', b'"I32"', 1), "dtype int32"),
        (_with(start, name, not_finite), "not finite"),
    ):
        with pytest.raises(TrustError, match=expected):
            parse_adapter(data, digest=sha256_hex(data), like=start)
    flipped = bytearray(start.file_bytes)
    flipped[-1] ^= 1
    with pytest.raises(TrustError, match="digest"):
        parse_adapter(bytes(flipped), digest=start.digest, like=start)
    assert parse_adapter(start.file_bytes, digest=start.digest, like=start).digest == start.digest


def test_a_published_adapter_is_not_copied_and_cannot_be_changed(start: Adapter) -> None:
    data = changed(start, seed=1).file_bytes
    parsed = parse_adapter(data, digest=sha256_hex(data), like=start)
    values = np.frombuffer(data, np.uint8)
    expected = load(data)
    assert parsed.tensors.keys() == expected.keys()
    for name, tensor in parsed.tensors.items():
        np.testing.assert_array_equal(tensor, expected[name])
        assert np.shares_memory(tensor, values)
        with pytest.raises(ValueError):
            tensor.flags.writeable = True
    assert parsed.file_bytes is data


def test_a_file_that_is_not_canonical_is_read_all_the_same(start: Adapter) -> None:
    """As another version of the library may write it."""
    data = save(dict(start.tensors), metadata={"format": "np"})
    parsed = parse_adapter(data, digest=sha256_hex(data), like=start)
    for name, tensor in start.tensors.items():
        np.testing.assert_array_equal(parsed.tensors[name], tensor)
    assert sha256_hex(parsed.file_bytes) == parsed.digest == sha256_hex(data)
    for name, tensor in parse_adapter(start.file_bytes, digest=start.digest, like=parsed).tensors.items():
        np.testing.assert_array_equal(start.tensors[name], tensor)


def test_memory_that_can_change_is_copied(start: Adapter) -> None:
    shape = (2, 3)
    for memory in (bytearray(24), np.zeros(24, np.uint8), memoryview(bytearray(24))):
        tensor = np.ndarray(shape, np.float32, buffer=memory)
        tensor.flags.writeable = False
        adapter = Adapter(start.shape, {"x": tensor})
        np.frombuffer(memory, np.float32)[:] = 1.0
        assert tensor.all() and not adapter.tensors["x"].any()
    half = np.ndarray(shape, np.float16, buffer=bytes(12))
    assert Adapter(start.shape, {"x": half}).tensors["x"].dtype == np.float32


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_one_bad_value_or_length_in_a_signed_file_is_refused(start: Adapter, data: st.DataObject) -> None:
    """Whatever the hub's key has signed."""
    header, begins = start.layout
    good = bytearray(start.file_bytes)
    place = len(header) + 4 * data.draw(st.integers(0, (len(good) - len(header)) // 4 - 1))
    good[place : place + 4] = np.float32(data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))).tobytes()
    odd = max((name for name in begins if begins[name] <= place), key=lambda name: begins[name])
    with pytest.raises(TrustError, match=f"^{odd} has a value that is not finite"):
        parse_adapter(bytes(good), digest=sha256_hex(good), like=start)
    for wrong in (start.file_bytes[:-1], start.file_bytes[:-4], start.file_bytes + bytes(4), header):
        with pytest.raises(TrustError, match="not a safetensors"):
            parse_adapter(wrong, digest=sha256_hex(wrong), like=start)


@given(
    st.lists(st.floats(width=32), max_size=40) | st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from([np.float16, np.float32]),
)
def test_a_sum_of_squares_tells_what_looking_at_every_value_tells(values: list[float], dtype: type) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, np.float32).astype(dtype)
    with np.errstate(all="raise"):  # and says nothing
        assert all_finite(array) == np.isfinite(array).all()


def drawn(sizes: dict[str, tuple[int, int]], rank: int, *, seed: int, scale: float = 1.0) -> Adapter:
    """Random factors of modules with weights (out, in); A is `scale` times as large as B."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (outputs, inputs) in sizes.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = scale * rng.normal(size=(rank, inputs))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = rng.normal(size=(outputs, rank))
    return Adapter(LoraShape(rank, 16.0, tuple(sizes)), tensors)


@given(
    st.lists(st.tuples(st.integers(5, 30), st.integers(5, 30)), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(0, 9),
    st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_balanced_factors_have_equal_norms_and_the_same_product(
    sizes: list[tuple[int, int]], rank: int, seed: int, scale: float
) -> None:
    adapter = drawn({f"m{i}": size for i, size in enumerate(sizes)}, rank, seed=seed, scale=scale)
    balanced = adapter.balanced()
    assert {n: t.shape for n, t in balanced.tensors.items()} == {n: t.shape for n, t in adapter.tensors.items()}
    difference = np.linalg.norm(balanced.products() - adapter.products()) / np.linalg.norm(adapter.products())
    assert difference < 1e-6
    for name_a in balanced.names("A"):
        a, b = balanced.tensors[name_a], balanced.tensors[name_a.replace(".lora_A.", ".lora_B.")]
        np.testing.assert_allclose(
            a @ a.T, b.T @ b, atol=1e-5 * float(np.linalg.norm(a @ a.T))
        )  # also direction by direction
        product = adapter.tensors[name_a.replace(".lora_A.", ".lora_B.")].astype(np.float64) @ adapter.tensors[name_a]
        singular = np.linalg.svd(product, compute_uv=False)[:rank]
        assert np.linalg.norm(a) == pytest.approx(np.sqrt(singular.sum()), rel=1e-4)


def test_balancing_twice_changes_nothing_more(start: Adapter) -> None:
    once = changed(start, seed=1).balanced()
    twice = once.balanced()
    for name, tensor in once.tensors.items():
        assert np.linalg.norm(twice.tensors[name]) == pytest.approx(np.linalg.norm(tensor), rel=1e-5)
    np.testing.assert_allclose(twice.products(), once.products(), atol=1e-6)


def test_products_are_what_the_layers_add(model: ModelFolder, start: Adapter) -> None:
    """Against the merged weights of PEFT, module by module."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    adapter = changed(start, seed=1)
    base = AutoModelForCausalLM.from_pretrained(model.path)
    before = {name: p.detach().numpy().copy() for name, p in base.named_parameters()}
    peft_model = get_peft_model(
        base, LoraConfig(r=SHAPE.rank, lora_alpha=SHAPE.alpha, target_modules=list(SHAPE.target_modules))
    )
    set_peft_model_state_dict(peft_model, {n: torch.from_numpy(t.copy()) for n, t in adapter.tensors.items()})
    merged = dict(peft_model.merge_and_unload().named_parameters())
    added = []
    for name_a in adapter.names("A"):
        weight = name_a.removeprefix(PREFIX).replace(".lora_A", "")
        added.append((merged[weight].detach().numpy() - before[weight]).reshape(-1))
    np.testing.assert_allclose(SHAPE.scaling * adapter.products(), np.concatenate(added), atol=1e-5)


def test_a_rank_above_a_layers_width_can_be_balanced() -> None:
    """As with rank 80 on a key projection of 64 outputs."""
    adapter = drawn({"narrow": (3, 10), "low": (10, 3), "wide": (20, 20)}, 6, seed=0)
    balanced = adapter.balanced()
    assert {n: t.shape for n, t in balanced.tensors.items()} == {n: t.shape for n, t in adapter.tensors.items()}
    np.testing.assert_allclose(balanced.products(), adapter.products(), atol=1e-5)


def test_the_digest_that_was_checked_is_the_adapters(start: Adapter) -> None:
    parsed = parse_adapter(start.file_bytes, digest=start.digest, like=start)
    assert parsed.digest == start.digest == Adapter(parsed.shape, parsed.tensors).digest
