"""Masks cancel, keys depend on everything, points of low order make no key."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import TrustError
from common.secagg import masking
from common.secagg.masking import KeyUse


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5000), st.binary(min_size=32, max_size=32))
def test_a_mask_added_and_taken_away_leaves_nothing(dimension: int, key: bytes) -> None:
    words_D = masking.mask(bytes(32), dimension)
    before = words_D.copy()
    masking.add_mask(words_D, key)
    assert dimension < 3 or not np.array_equal(words_D, before)
    masking.add_mask(words_D, key, sign=-1)
    assert np.array_equal(words_D, before)


def test_masks_longer_than_a_chunk_are_one_keystream() -> None:
    dimension = (1 << 18) * 2 + 77
    words_D = masking.mask(bytes(range(32)), dimension)
    assert np.array_equal(words_D, np.frombuffer(masking.keystream(bytes(range(32)), 4 * dimension), "<u4"))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, (1 << 19) + 77), st.binary(min_size=32, max_size=32))
def test_masks_of_sixteen_bits_are_the_same_keystream_in_half_the_bytes(dimension: int, key: bytes) -> None:
    words_D = np.zeros(dimension, np.uint16)
    masking.add_mask(words_D, key)
    assert np.array_equal(words_D, np.frombuffer(masking.keystream(key, 2 * dimension), "<u2"))
    masking.add_mask(words_D, bytes(32))
    masking.add_mask(words_D, key, sign=-1)
    masking.add_mask(words_D, bytes(32), sign=-1)
    assert not words_D.any()


def test_the_two_ends_of_a_pair_cancel() -> None:
    a, b = os.urandom(32), os.urandom(32)
    use = masking.mask_use(bytes(32), "b", "a")
    one = masking.agree(a, masking.public_of(b), use)
    other = masking.agree(b, masking.public_of(a), use)
    words_D = np.zeros(100, np.uint32)
    masking.add_mask(words_D, one, sign=masking.mask_sign("a", "b"))
    masking.add_mask(words_D, other, sign=masking.mask_sign("b", "a"))
    assert one == other and not words_D.any()


def test_a_key_depends_on_every_part_of_its_use() -> None:
    use = KeyUse("mask", bytes(32), "a", "b")
    uses = [
        use,
        replace(use, label="share"),
        replace(use, transcript=b"\x01" + bytes(31)),
        replace(use, first="ab", second=""),
        replace(use, first="b", second="a"),
        replace(use, second="c"),
    ]
    assert len({masking.derive(bytes(32), one) for one in uses}) == len(uses)


LOW_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_make_no_key(point: bytes) -> None:
    assert not masking.contributes(point)
    with pytest.raises(TrustError, match="low order"):
        masking.agree(os.urandom(32), point, KeyUse("mask", bytes(32), "a", "b"))


def _exchanges(public: bytes) -> bool:
    """What contributing means: an exchange with the key gives a secret that is not zero."""
    try:
        X25519PrivateKey.from_private_bytes(b"\x01" * 32).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


NEAR_LOW_ORDER = sorted(
    {
        (number + step) % 2**256
        for low in LOW_ORDER
        for number in (int.from_bytes(low, "little"),)
        for base in (0, 2**255 - 19, 2**255)
        for step in (base + small for small in range(-20, 21))
    }
    | {sign % 2**256 for sign in range(-40, 41)}
)


@pytest.mark.parametrize("block", range(0, len(NEAR_LOW_ORDER), 100))
def test_a_key_contributes_exactly_where_an_exchange_with_it_makes_a_secret(block: int) -> None:
    """Around every point of low order, with the bit that X25519 ignores and coordinates beyond the prime."""
    points = [number.to_bytes(32, "little") for number in NEAR_LOW_ORDER[block : block + 100]]
    assert [masking.contributes(point) for point in points] == [_exchanges(point) for point in points]


@given(st.binary(min_size=30, max_size=34))
def test_any_bytes_contribute_exactly_where_they_exchange(public: bytes) -> None:
    assert masking.contributes(public) == _exchanges(public)


def test_ordinary_points_do() -> None:
    assert all(masking.contributes(masking.public_of(os.urandom(32))) for _ in range(50))
    assert not masking.contributes(b"short")
