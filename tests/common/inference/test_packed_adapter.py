import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.adapter import PREFIX, Adapter, LoraShape, initial_adapter
from common.errors import TrustError
from common.inference.model_folder import TARGET_MODULES, ModelFolder, module_shapes_of_a_layer
from common.inference.packed_adapter import PROJECTION_GROUPS, graph_inputs


def drawn(model: ModelFolder, shape: LoraShape, *, seed: int) -> Adapter:
    """Random factors of every target module."""
    targets = {n: size for n, size in model.module_shapes().items() if n.rpartition(".")[2] in shape.target_modules}
    rng = np.random.default_rng(seed)
    tensors = initial_adapter(targets, shape, seed=0).tensors
    return Adapter(shape, {name: rng.normal(size=tensor.shape) for name, tensor in tensors.items()})


@given(
    st.sets(st.sampled_from(TARGET_MODULES), min_size=1),
    st.integers(1, 5),
    st.sampled_from([0.3, 1.0, 16.0, -2.0]),
    st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_a_fused_group_adds_what_its_projections_add(
    model: ModelFolder, targets: set[str], rank: int, alpha: float, seed: int
) -> None:
    """x A B of a group is (alpha / r) x Aᵀ Bᵀ of each of its projections, side by side; zero where none is trained."""
    adapter = drawn(model, LoraShape(rank, alpha, tuple(sorted(targets))), seed=seed)
    inputs, sizes = graph_inputs(adapter, model, np.float32), module_shapes_of_a_layer(model.dimensions)
    names = set()
    for layer in range(model.dimensions.layers):
        for group, modules in PROJECTION_GROUPS.items():
            name = f"l{layer}.{group}"
            if not any(module.rpartition(".")[2] in targets for module in modules):
                assert f"{name}.A" not in inputs
                continue
            names |= {f"{name}.A", f"{name}.B"}
            expected = []
            for module in modules:
                a = adapter.tensors.get(f"{PREFIX}model.layers.{layer}.{module}.lora_A.weight")
                b = adapter.tensors.get(f"{PREFIX}model.layers.{layer}.{module}.lora_B.weight")
                outputs, width = sizes[module]
                zero = np.zeros((outputs, width))
                expected.append(zero if a is None or b is None else alpha / rank * (b.astype(np.float64) @ a))
            found = inputs[f"{name}.A"].astype(np.float64) @ inputs[f"{name}.B"]
            np.testing.assert_allclose(found, np.concatenate(expected).T, rtol=1e-5, atol=1e-5)
            assert inputs[f"{name}.A"].flags.c_contiguous and inputs[f"{name}.B"].flags.c_contiguous
    assert set(inputs) == names


def test_half_precision_is_the_rounded_single(model: ModelFolder) -> None:
    adapter = drawn(model, LoraShape(8, 7.0, TARGET_MODULES), seed=1)
    single, half = (graph_inputs(adapter, model, dtype) for dtype in (np.float32, np.float16))
    assert single.keys() == half.keys()
    for name, array in half.items():
        np.testing.assert_array_equal(array, single[name].astype(np.float16))


def test_a_finite_adapter_whose_scaled_values_are_not_is_refused(model: ModelFolder) -> None:
    adapter = drawn(model, LoraShape(1, 16.0, ("q_proj",)), seed=1)
    (name, *_) = adapter.names("B")
    large = np.array(adapter.tensors[name])
    large[-1] = 1e38
    with pytest.raises(TrustError, match=r"^l0\.qkv\.B has a value that float32 cannot hold"):
        graph_inputs(Adapter(adapter.shape, {**adapter.tensors, name: large}), model, np.float32)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_single_value_that_is_not_finite_is_refused_wherever_it_is(model: ModelFolder, data: st.DataObject) -> None:
    adapter = drawn(model, LoraShape(2, 4.0, ("k_proj", "down_proj")), seed=1)
    name = data.draw(st.sampled_from(list(adapter.tensors)))
    tensor = np.array(adapter.tensors[name])
    place = data.draw(st.integers(0, tensor.size - 1))
    tensor.reshape(-1)[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    with pytest.raises(TrustError, match=f"^{name} has a value that is not finite"):
        graph_inputs(Adapter(adapter.shape, {**adapter.tensors, name: tensor}), model, np.float32)
