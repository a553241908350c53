"""Rounding into the ring: exact sums, no bias, no wrap."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PrivacyError
from common.secagg.ring import Ring


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 9),
    st.lists(st.sampled_from([1, 2, 4]), min_size=9, max_size=9),
    st.floats(1e-4, 1e4),
    st.integers(0, 2**31),
)
def test_a_sum_in_the_ring_is_the_sum_of_the_floats_up_to_one_step_each(
    sites: int, weights: list[int], clip: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ring = Ring(clip, sum(weights[:sites]))
    updates_ND = rng.normal(size=(sites, 50))
    updates_ND *= clip * rng.uniform(0, 1, (sites, 1)) / np.linalg.norm(updates_ND, axis=1, keepdims=True)
    words = [ring.quantise(u, weight=w, key=os.urandom(32)) for u, w in zip(updates_ND, weights, strict=False)]
    total_D = np.sum(words, axis=0, dtype=np.uint32)
    exact_D = (np.array(weights[:sites])[:, None] * updates_ND).sum(0)
    assert np.abs(ring.values(total_D) - exact_D).max() <= (sites + 1e-3) / ring.scale


def test_the_whole_norm_in_one_coordinate_of_everybody_does_not_wrap() -> None:
    ring = Ring(3.0, 4096)
    update_D = np.array([3.0, 0.0])
    total_D = np.sum(
        [ring.quantise(update_D, weight=4, key=os.urandom(32)) for _ in range(1024)], axis=0, dtype=np.uint32
    )
    assert ring.values(total_D)[0] == pytest.approx(3.0 * 4096, rel=1e-5)
    total_D = np.sum(
        [ring.quantise(-update_D, weight=4, key=os.urandom(32)) for _ in range(1024)], axis=0, dtype=np.uint32
    )
    assert ring.values(total_D)[0] == pytest.approx(-3.0 * 4096, rel=1e-5)


def test_an_update_beyond_the_clip_is_scaled_to_it() -> None:
    ring = Ring(1.0, 3)
    words_D = ring.quantise(np.array([30.0, 40.0]), weight=1, key=bytes(32))
    assert np.allclose(ring.values(words_D), [0.6, 0.8], atol=1e-7)


def test_rounding_has_no_bias_and_its_draws_are_fresh() -> None:
    ring = Ring(1.0, 1 << 12)
    update_D = np.full(200_000, 0.3 / ring.scale)
    words_D = ring.quantise(update_D, weight=1, key=os.urandom(32)).view(np.int32)
    assert set(np.unique(words_D)) == {0, 1}
    assert words_D.mean() == pytest.approx(0.3, abs=0.006)  # six standard deviations
    assert abs(np.corrcoef(words_D[:-1], words_D[1:])[0, 1]) < 0.02
    again_D = ring.quantise(update_D, weight=1, key=os.urandom(32)).view(np.int32)
    assert not np.array_equal(words_D, again_D)
    negative_D = ring.quantise(-update_D, weight=1, key=os.urandom(32)).view(np.int32)
    assert negative_D.mean() == pytest.approx(-0.3, abs=0.006)


def test_long_updates_are_rounded_in_pieces_with_the_same_result() -> None:
    update_D = np.random.default_rng(0).normal(size=(1 << 18) + 5)
    update_D /= np.linalg.norm(update_D)
    ring = Ring(1.0, 3)
    words_D = ring.quantise(update_D, weight=1, key=bytes(32))
    assert np.abs(ring.values(words_D) - update_D).max() <= 1.001 / ring.scale


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(PrivacyError, match="not finite"):
        Ring(1.0, 3).quantise(np.array([0.0, value]), weight=1, key=bytes(32))


def test_zero_stays_zero_up_to_rounding() -> None:
    assert set(np.unique(Ring(1.0, 3).quantise(np.zeros(1000), weight=1, key=bytes(32)))) == {0}
