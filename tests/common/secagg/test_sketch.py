"""The map P: linear in the ring, faithful to norms, and without the kernels of the first design (I1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.secagg.masking import mask
from common.secagg.sketch import BUCKETS, Sketch, as_floats, buckets_for


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 3000), st.sampled_from(BUCKETS))
def test_it_is_linear_modulo_2_32(seed: bytes, dimension: int, buckets: int) -> None:
    sketch = Sketch(seed, dimension, buckets)
    one, other = mask(seed, dimension), mask(bytes(32), dimension)
    assert np.array_equal(sketch.apply(one + other), sketch.apply(one) + sketch.apply(other))
    assert np.array_equal(sketch.apply(np.uint32(0) - one), np.uint32(0) - sketch.apply(one))


def test_largest_words_sum_exactly() -> None:
    """Every word 2³² − 1, which is −1: float64 adds a chunk of them without rounding."""
    dimension = (1 << 20) + 12_345
    sketch = Sketch(bytes(32), dimension, 128)
    assert np.array_equal(
        sketch.apply(np.full(dimension, 2**32 - 1, np.uint32)),
        np.uint32(0) - sketch.apply(np.ones(dimension, np.uint32)),
    )


def shapes(dimension: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sparse = np.zeros(dimension)
    sparse[rng.integers(dimension, size=100)] = rng.normal(size=100)
    return {
        "dense": rng.normal(size=dimension),
        "heavy tails": rng.standard_t(2, size=dimension),
        "one rank of a row-major factor": np.where(np.arange(dimension) % 16 == 3, rng.normal(size=dimension), 0),
        "a hundred coordinates": sparse,
    }


@pytest.mark.parametrize(("buckets", "deviation"), [(128, 0.032), (32, 0.065)])
@pytest.mark.parametrize("kind", sorted(shapes(64)))
def test_norms_are_kept(kind: str, buckets: int, deviation: float) -> None:
    dimension = 20_000
    update_D = shapes(dimension)[kind]
    words_D = np.rint(update_D / np.linalg.norm(update_D) * 2**26).astype(np.int64).astype(np.uint32)
    norms = [
        np.linalg.norm(as_floats(Sketch(os.urandom(32), dimension, buckets).apply(words_D), scale=2.0**26))
        for _ in range(60)
    ]
    assert np.mean(norms) == pytest.approx(1, abs=0.03)
    assert np.std(norms) < 1.6 * deviation


def test_i1_two_equal_entries_do_not_vanish() -> None:
    """The blocked sketch mapped such a pair, one residue class apart, to zero in one of 1024 draws."""
    dimension = 4096
    words_D = np.zeros(dimension, np.uint32)
    words_D[[3, 19 + 640]] = 1 << 28
    vanished = sum(not Sketch(os.urandom(32), dimension, 32).apply(words_D).any() for _ in range(3000))
    assert vanished == 0  # 3000 · 2⁻²⁴ expected


@pytest.mark.parametrize("dimension", [40_960, 65_536])
def test_i1_half_the_ring_everywhere_is_seen(dimension: int) -> None:
    """2³¹ in every coordinate is zero where buckets are equally full; here their fullness is random."""
    for words_D in (
        np.full(dimension, 1 << 31, np.uint32),
        np.where(np.arange(dimension) % 16 == 3, 1 << 31, 0).astype(np.uint32),
    ):
        for _ in range(5):
            assert np.count_nonzero(Sketch(os.urandom(32), dimension, 128).apply(words_D)) > 150


def test_seeds_and_tables_are_independent() -> None:
    one, other = Sketch(bytes(32), 10_000, 128), Sketch(b"\x01" + bytes(31), 10_000, 128)
    tables = [*one._bytes_TD, *other._bytes_TD]
    for i, first in enumerate(tables):
        for second in tables[:i]:
            assert np.mean(first == second) == pytest.approx(1 / 256, abs=0.004)
        assert np.bincount(first, minlength=256).std() < 12


def test_sizes() -> None:
    assert [buckets_for(d) for d in (9_846, 9_847, 19_693, 39_385, 10**8)] == [0, 32, 64, 128, 128]
    with pytest.raises(ValueError, match="buckets"):
        Sketch(bytes(32), 100, 256)
    with pytest.raises(ValueError, match="the sketch is of 100"):
        Sketch(bytes(32), 100, 32).apply(np.zeros(99, np.uint32))
