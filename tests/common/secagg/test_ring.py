"""Rounding into the rings of 32 and 16 bits: exact sums, no bias, no wrap, as fine as stated."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PrivacyError, RoundError
from common.secagg import ring as ring_module
from common.secagg.ring import LARGEST_WEIGHT, Ring
from common.secagg.rotation import Rotation


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


# --- sixteen bits


def narrow(clip: float, total_weight: int, dimension: int, seed: bytes = bytes(32)) -> Ring:
    return Ring(clip, total_weight, Rotation(seed, dimension))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 9),
    st.lists(st.sampled_from([1, 2, 4]), min_size=9, max_size=9),
    st.floats(1e-4, 1e4),
    st.integers(256, 5000),
    st.integers(0, 2**31),
)
def test_a_narrow_sum_is_the_sum_of_the_floats_up_to_one_step_each(
    sites: int, weights: list[int], clip: float, dimension: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ring = narrow(clip, sum(weights[:sites]), dimension, rng.bytes(32))
    updates_ND = rng.normal(size=(sites, dimension))
    updates_ND *= clip * rng.uniform(0, 1, (sites, 1)) / np.linalg.norm(updates_ND, axis=1, keepdims=True)
    words = [ring.quantise(u, weight=w, key=os.urandom(32)) for u, w in zip(updates_ND, weights, strict=False)]
    assert {word_D.dtype for word_D in words} == {np.dtype(np.uint16)}
    total_D = np.sum(words, axis=0, dtype=np.uint16)
    exact_D = (np.array(weights[:sites])[:, None] * updates_ND).sum(0)
    error = np.linalg.norm(ring.values(total_D) - exact_D)
    assert error <= ring.rounding_norm(dimension, sites)
    assert error <= 1.2 * np.sqrt(sites) * 1.3e-4 * ring.total_weight * clip  # as stated, and chance


@pytest.mark.parametrize("total_weight", [3, 20, LARGEST_WEIGHT[16]])
@pytest.mark.parametrize("dimension", [4096, 8191])
def test_one_updates_rounding_is_as_small_as_stated(total_weight: int, dimension: int) -> None:
    ring = narrow(2.0, total_weight, dimension)
    update_D = np.random.default_rng(0).normal(size=dimension)
    update_D *= 2.0 / np.linalg.norm(update_D)
    error_D = ring.values(ring.quantise(update_D, weight=1, key=os.urandom(32))) - update_D
    assert np.linalg.norm(error_D) <= 1.3e-4 * total_weight * 2.0 < 0.034 * 2.0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_narrow_sum_of_everybodys_largest_word_does_not_wrap(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip in one rotated coordinate, by all, with the largest total weight: cut to the range, and all of it."""
    monkeypatch.setattr(ring_module, "LARGEST_LOSS", 1.0)
    most = LARGEST_WEIGHT[16]
    for weight in (1, 4):
        ring = narrow(3.0, most, 300)
        place_D = np.zeros(300, np.float32)
        place_D[17] = sign * 3.0
        update_D = ring.rotation.undo(place_D)  # type: ignore[union-attr]
        words = [ring.quantise(update_D, weight=weight, key=os.urandom(32)) for _ in range(most // weight)]
        total = int(np.sum([word_D[17] for word_D in words], dtype=np.uint16).view(np.int16))
        assert total / ring.scale == pytest.approx(sign * most * ring.range, rel=1e-3 + most / weight / 2**15)
        assert abs(total) < 2**15


def test_a_narrow_ring_leaves_every_site_its_step() -> None:
    """The largest words that rounding can make, summed, are the largest of 16 bits and no more."""
    for total_weight in range(1, LARGEST_WEIGHT[16] + 1):
        ring = narrow(1.0, total_weight, 1 << 12)
        largest = sum(np.floor(ring.range * ring.scale + (1 - 2.0**-32)) for _ in range(total_weight))
        assert largest <= 2**15 - 1
        assert total_weight * ring.range * ring.scale >= 0.98 * 2**15


def test_an_update_that_knows_the_seed_is_refused_and_another_seed_takes_it() -> None:
    ring = narrow(1.0, 3, 5000)
    hidden_D = np.zeros(5000, np.float32)
    hidden_D[::500] = 0.3
    update_D = ring.rotation.undo(hidden_D)  # type: ignore[union-attr]
    with pytest.raises(RoundError, match="does not fit words of 16 bits"):
        ring.quantise(update_D, weight=1, key=bytes(32))
    other = narrow(1.0, 3, 5000, bytes([1] * 32))
    assert np.linalg.norm(other.values(other.quantise(update_D, weight=1, key=bytes(32))) - update_D) < 0.001


@pytest.mark.parametrize(("loss", "is_refused"), [(0.008, False), (0.012, True)])
def test_what_is_cut_is_measured_against_the_clip(loss: float, is_refused: bool) -> None:
    ring = narrow(7.0, 3, 4096)
    turned_D = np.zeros(4096, np.float32)
    turned_D[5] = -(ring.range + loss * 7.0)
    update_D = ring.rotation.undo(turned_D)  # type: ignore[union-attr]
    if is_refused:
        with pytest.raises(RoundError, match=r"1\.2% of the clip"):
            ring.quantise(update_D, weight=1, key=bytes(32))
    else:
        found_D = ring.values(ring.quantise(update_D, weight=1, key=bytes(32)))
        assert np.linalg.norm(found_D - update_D) == pytest.approx(0.008 * 7.0, rel=0.1)


def test_cutting_loses_less_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of docs/leakage.md, E loss² <= 4 (D / B) exp(-r²/2) / r² C², at a range where there is something to see."""
    monkeypatch.setattr(ring_module, "RANGE", 3.0)
    dimension, losses = 3000, []
    for seed in range(40):
        ring = narrow(1.0, 3, dimension, bytes([seed] * 32))
        update_D = np.random.default_rng(seed).normal(size=dimension).astype(np.float32)
        turned_D = ring.coordinates(update_D / np.linalg.norm(update_D))
        losses.append(np.linalg.norm(turned_D - np.clip(turned_D, -ring.range, ring.range)))
    bound = np.sqrt(4 * (dimension / 2048) * np.exp(-4.5) / 9)
    assert 0.01 * bound < np.sqrt(np.mean(np.square(losses))) <= bound


def test_narrow_rounding_has_no_bias() -> None:
    ring = narrow(1.0, 256, 2000)
    update_D = np.random.default_rng(0).normal(size=2000)
    update_D *= 0.01 / np.linalg.norm(update_D)  # of a few steps
    found_D = np.mean([ring.values(ring.quantise(update_D, weight=1, key=os.urandom(32))) for _ in range(400)], axis=0)
    once = np.linalg.norm(ring.values(ring.quantise(update_D, weight=1, key=os.urandom(32))) - update_D)
    assert once > 0.5 * np.linalg.norm(update_D)
    assert np.linalg.norm(found_D - update_D) == pytest.approx(once / 20, rel=0.25)  # chance alone


def test_a_narrow_ring_refuses_what_is_not_finite_and_takes_zero() -> None:
    ring = narrow(1.0, 3, 100)
    with pytest.raises(PrivacyError, match="not finite"):
        ring.quantise(np.r_[np.zeros(99), np.nan], weight=1, key=bytes(32))
    assert set(np.unique(ring.quantise(np.zeros(100), weight=1, key=bytes(32)))) == {0}


def test_an_update_beyond_the_clip_is_scaled_to_it_before_it_is_turned() -> None:
    ring = narrow(1.0, 3, 2000)
    update_D = np.random.default_rng(0).normal(size=2000)
    found_D = ring.values(ring.quantise(update_D, weight=1, key=bytes(32)))
    assert np.linalg.norm(found_D - update_D / np.linalg.norm(update_D)) < 0.001


@pytest.mark.parametrize("ring", [Ring(2.0, 20), narrow(2.0, 20, 3000)], ids=["32", "16"])
def test_the_norm_of_words_is_that_of_their_values(ring: Ring) -> None:
    words_D = np.frombuffer(os.urandom(3000 * ring.dtype.itemsize), ring.dtype)
    assert ring.norm(words_D) == pytest.approx(np.linalg.norm(ring.values(words_D)), rel=1e-5)
