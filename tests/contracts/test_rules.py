"""What every aggregation rule must do, whatever it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.rules import RULES, tolerated_liars

ROBUST = [name for name in RULES if name != "mean"]
D = 20


def drawn(seed: int, sites: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(sites, D)).astype(np.float32)


def combined(name: str, updates: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    weights = np.ones(len(updates)) if weights is None else weights
    return RULES[name].combine(updates, weights, tolerated_liars(len(updates)))


seeds, sizes = st.integers(0, 10_000), st.integers(5, 12)


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=30)
@given(seeds, sizes)
def test_the_order_of_sites_does_not_matter(name: str, seed: int, sites: int) -> None:
    updates = drawn(seed, sites)
    order = np.random.default_rng(seed + 1).permutation(sites)
    np.testing.assert_allclose(combined(name, updates), combined(name, updates[order]), atol=1e-5)


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=30)
@given(seeds, sizes)
def test_the_result_is_float32_and_within_the_range_of_what_was_sent(name: str, seed: int, sites: int) -> None:
    updates = drawn(seed, sites)
    result = combined(name, updates)
    assert result.dtype == np.float32
    assert result.shape == (D,)
    assert (result <= updates.max(axis=0) + 1e-5).all()
    assert (result >= updates.min(axis=0) - 1e-5).all()


@pytest.mark.parametrize("name", RULES)
@given(st.floats(-5, 5, width=32))
def test_sites_that_agree_are_followed(name: str, value: float) -> None:
    np.testing.assert_allclose(combined(name, np.full((6, D), value, np.float32)), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ROBUST)
@settings(deadline=None, max_examples=40)
@given(seeds, sizes, st.sampled_from([1e1, 1e4, 1e15]))
def test_one_liar_cannot_leave_the_honest_range(name: str, seed: int, sites: int, size: float) -> None:
    """After mixing, every coordinate stays among means of honest updates but for a bounded share of the liar."""
    updates = drawn(seed, sites)
    honest = updates[1:]
    lie = np.random.default_rng(seed + 2).choice([-1.0, 1.0], D).astype(np.float32) * np.float32(size)
    updates[0] = lie
    result = combined(name, updates)
    assert (result <= honest.max(axis=0) + 1e-4).all()
    assert (result >= honest.min(axis=0) - 1e-4).all()


@pytest.mark.parametrize("name", ROBUST)
@settings(deadline=None, max_examples=20)
@given(seeds)
def test_the_result_is_close_to_the_honest_mean_under_a_lie_within_the_norm(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    signal = rng.normal(size=D) * 2
    updates = (signal + rng.normal(size=(6, D)) * 0.3).astype(np.float32)
    updates[0] = -updates[0]
    honest_mean = updates[1:].mean(axis=0)
    assert np.linalg.norm(combined(name, updates) - honest_mean) < np.linalg.norm(
        combined("mean", updates) - honest_mean
    )


@settings(deadline=None)
@given(seeds, st.lists(st.sampled_from([1, 2, 4]), min_size=5, max_size=8))
def test_the_mean_follows_contract_weights_and_robust_rules_ignore_them(seed: int, weights: list[int]) -> None:
    updates = drawn(seed, len(weights))
    expected = np.average(updates.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(combined("mean", updates, np.array(weights)), expected, atol=1e-6)
    for name in ROBUST:
        np.testing.assert_array_equal(combined(name, updates, np.array(weights)), combined(name, updates))


def test_tolerated_liars_grow_with_the_federation() -> None:
    assert [tolerated_liars(n) for n in (3, 5, 6, 8, 9, 12, 13, 20)] == [1, 1, 1, 1, 2, 2, 3, 4]
