"""Adapters of different ranks as one, and one as part of its base."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.adapter import PREFIX, Adapter, LoraShape
from common.errors import ConfigError, TrustError
from common.merging import merged_weights, recompressed, weighted_sum

SIZES = {"m.q": (14, 9), "m.k": (6, 20)}


def drawn(rank: int, alpha: float, *, seed: int, sizes: dict[str, tuple[int, int]] = SIZES) -> Adapter:
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (outputs, inputs) in sizes.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = rng.normal(size=(rank, inputs))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = rng.normal(size=(outputs, rank))
    return Adapter(LoraShape(rank, alpha, tuple(sizes)), tensors)


def effect(adapter: Adapter) -> np.ndarray:
    return adapter.shape.scaling * adapter.products()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1.0, 8.0, 16.0])), min_size=1, max_size=3),
    st.integers(0, 100),
    st.integers(15, 20),
    st.sampled_from([1.0, 16.0]),
)
def test_at_a_rank_as_large_as_the_sum_of_ranks_nothing_is_lost(
    parts: list[tuple[int, float]], seed: int, rank: int, alpha: float
) -> None:
    adapters = [drawn(r, a, seed=seed + i) for i, (r, a) in enumerate(parts)]
    shares = np.random.default_rng(seed).uniform(0.1, 1, len(parts))
    found = weighted_sum(adapters, list(shares), rank=rank, alpha=alpha)
    expected = sum(share * effect(one) for share, one in zip(shares, adapters, strict=True))
    np.testing.assert_allclose(effect(found.adapter), expected, atol=1e-5 * np.abs(expected).max())
    assert found.relative_error < 1e-12
    assert (found.adapter.shape.rank, found.adapter.shape.alpha) == (rank, alpha)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(0, 100))
def test_the_reported_error_is_the_error_and_no_approximation_of_that_rank_is_better(rank: int, seed: int) -> None:
    adapters = [drawn(4, 8.0, seed=seed), drawn(2, 2.0, seed=seed + 1)]
    exact = weighted_sum(adapters, [0.5, 0.5], rank=20, alpha=1.0).adapter
    found = weighted_sum(adapters, [0.5, 0.5], rank=rank, alpha=4.0)
    wanted = effect(exact)
    error = np.linalg.norm(effect(found.adapter) - wanted) / np.linalg.norm(wanted)
    assert found.relative_error == pytest.approx(error, rel=1e-3, abs=1e-6)
    lost, start = 0.0, 0
    for outputs, inputs in (SIZES[m] for m in sorted(SIZES)):
        part = wanted[start : start + outputs * inputs].reshape(outputs, inputs)
        start += outputs * inputs
        lost += (np.linalg.svd(part, compute_uv=False)[rank:] ** 2).sum()
    assert error == pytest.approx(np.sqrt(lost) / np.linalg.norm(wanted), rel=1e-3, abs=1e-6)


def test_another_rank_keeps_the_scaling_and_more_than_enough_keeps_everything() -> None:
    adapter = drawn(4, 8.0, seed=0)
    smaller, larger = recompressed(adapter, rank=2), recompressed(adapter, rank=9)
    assert smaller.adapter.shape.scaling == larger.adapter.shape.scaling == adapter.shape.scaling
    assert 0 < smaller.relative_error < 1
    np.testing.assert_allclose(effect(larger.adapter), effect(adapter), atol=1e-5)
    assert larger.relative_error < 1e-12


def test_an_adapter_that_does_nothing_stays_one() -> None:
    nothing = Adapter(
        LoraShape(4, 8.0, tuple(SIZES)),
        {name: 0 * tensor if "lora_B" in name else tensor for name, tensor in drawn(4, 8.0, seed=0).tensors.items()},
    )
    found = recompressed(nothing, rank=3)
    assert found.relative_error == 0
    assert not effect(found.adapter).any()


def test_merging_adds_the_scaled_product() -> None:
    adapter = drawn(3, 6.0, seed=1)
    weights = {f"{m}.weight": np.random.default_rng(2).normal(size=s).astype(np.float32) for m, s in SIZES.items()}
    weights["other.weight"] = np.ones(3, np.float32)
    merged = merged_weights(weights, adapter)
    assert set(merged) == set(weights)
    np.testing.assert_array_equal(merged["other.weight"], weights["other.weight"])
    for module in SIZES:
        a, b = (adapter.tensors[f"{PREFIX}{module}.lora_{f}.weight"] for f in "AB")
        np.testing.assert_allclose(merged[f"{module}.weight"], weights[f"{module}.weight"] + 2.0 * b @ a, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    adapter = drawn(3, 6.0, seed=1)
    weights = {f"{m}.weight": np.zeros(s, np.float32) for m, s in SIZES.items()}
    with pytest.raises(ConfigError, match=r"m\.k"):
        merged_weights({"m.q.weight": weights["m.q.weight"]}, adapter)
    with pytest.raises(ConfigError, match="does not fit"):
        merged_weights({**weights, "m.k.weight": np.zeros((6, 21), np.float32)}, adapter)
    huge = Adapter(adapter.shape, {n: np.full_like(t, 1e25) for n, t in adapter.tensors.items()})
    with pytest.raises(TrustError, match="not finite"):
        merged_weights(weights, huge)
    with pytest.raises(ConfigError, match="different modules"):
        weighted_sum([adapter, drawn(3, 6.0, seed=1, sizes={"m.q": (14, 9)})], [0.5, 0.5], rank=3, alpha=1.0)
    with pytest.raises(ConfigError, match="differ in the shape"):
        weighted_sum([adapter, drawn(3, 6.0, seed=1, sizes={**SIZES, "m.q": (14, 8)})], [0.5, 0.5], rank=3, alpha=1.0)
    with pytest.raises(ConfigError, match="no adapter"):
        weighted_sum([], [], rank=3, alpha=1.0)
