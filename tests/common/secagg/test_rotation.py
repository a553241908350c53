"""The rotation: orthogonal, undone, SciPy's transform, and as even as it says for every fixed update."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from common.secagg.rotation import Rotation, walsh_hadamard

SIZES = [1, 2, 4, 8, 16, 32, 128, 256, 1024, 2048]


@pytest.mark.parametrize("size", SIZES)
def test_the_transform_is_scipys_matrix_over_the_root_of_its_size(size: int) -> None:
    found = np.stack([walsh_hadamard(row) for row in np.eye(size, dtype=np.float32)])
    assert np.abs(found - hadamard(size) / math.sqrt(size)).max() < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.binary(min_size=32, max_size=32))
def test_it_is_orthogonal(dimension: int, seed: bytes) -> None:
    rotation = Rotation(seed, dimension)
    matrix = np.stack([rotation.apply(row) for row in np.eye(dimension)]).astype(np.float64)
    assert np.abs(matrix @ matrix.T - np.eye(dimension)).max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70_000), st.integers(0, 2**31), st.floats(-20, 20))
def test_it_is_undone_and_linear(dimension: int, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    rotation = Rotation(rng.bytes(32), dimension)
    one_D, other_D = rng.normal(size=(2, dimension)) * 10**exponent
    kept_D = one_D.copy()
    turned_D = rotation.apply(one_D)
    size = np.linalg.norm(one_D) + np.linalg.norm(other_D)
    assert np.linalg.norm(rotation.undo(turned_D) - one_D) <= 2e-6 * size
    assert np.array_equal(one_D, kept_D), "its argument is left alone"
    both_D = rotation.apply(2 * one_D - other_D)
    assert np.linalg.norm(both_D - (2 * turned_D - rotation.apply(other_D))) <= 5e-6 * size


def test_its_block_is_the_largest_power_of_two_and_nothing_is_padded() -> None:
    for dimension, block in ((1, 1), (2, 2), (3, 2), (4, 4), (4095, 2048), (4096, 4096), (4097, 4096)):
        rotation = Rotation(bytes(32), dimension)
        assert rotation.block == block
        assert rotation.apply(np.ones(dimension)).shape == (dimension,)


def _fixed(dimension: int) -> dict[str, np.ndarray]:
    """Updates that are hard to spread, of norm one."""
    rng, places = np.random.default_rng(1), np.arange(dimension)
    found = {
        "first": places == 0,
        "middle": places == dimension // 2,
        "last": places == dimension - 1,
        "constant": places >= 0,
        "the part only the first transform sees": places <= dimension - (1 << (dimension.bit_length() - 1)),
        "sixty-four in a row": (places >= 256) & (places < 320),
        "every sixteenth": places % 16 == 0,
        "heavy tails": rng.standard_t(1.1, dimension),
        "a row of the transform": hadamard(1024)[77][places % 1024],
    }
    return {name: values / np.linalg.norm(values.astype(float)) for name, values in found.items()}


@pytest.mark.parametrize("dimension", [1024, 1500, 2047])
def test_coordinates_are_as_small_as_stated_for_every_update_that_does_not_know_the_seed(dimension: int) -> None:
    seeds = [bytes([number] * 32) for number in range(120)]
    for name, update_D in _fixed(dimension).items():
        turned = np.abs([Rotation(seed, dimension).apply(update_D) for seed in seeds])
        turned *= math.sqrt(Rotation(seeds[0], dimension).block)
        assert turned.max() < 6, name
        for deviations in (2.0, 3.0):
            share = 2 * math.exp(-(deviations**2) / 2)
            for half in (turned[:, : dimension // 2], turned[:, dimension // 2 :]):
                assert (half > deviations).mean() <= share, (name, deviations)


def test_it_is_another_one_for_another_seed() -> None:
    update_D = np.ones(100)
    one, other = (Rotation(bytes([n] * 32), 100).apply(update_D) for n in (1, 2))
    assert np.abs(one - other).max() > 0.5
    assert np.linalg.norm(Rotation(bytes([1] * 32), 100).undo(other) - update_D) > 5


def test_an_array_of_another_size_is_refused() -> None:
    rotation = Rotation(bytes(32), 10)
    for shape in ((9,), (11,), (2, 5)):
        with pytest.raises(ValueError, match="of 10 coordinates"):
            rotation.apply(np.zeros(shape))
        with pytest.raises(ValueError, match="of 10 coordinates"):
            rotation.undo(np.zeros(shape))
