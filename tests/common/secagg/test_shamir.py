"""Any `threshold` shares give the secret, fewer fit every secret."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.secagg import shamir


@settings(max_examples=40, deadline=None)
@given(st.data(), st.binary(min_size=32, max_size=32))
def test_any_threshold_of_shares_gives_the_secret(data: st.DataObject, secret: bytes) -> None:
    points = data.draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(points)))
    shares = shamir.split(secret, threshold=threshold, points=points, entropy=os.urandom)
    some = data.draw(st.lists(st.sampled_from(points), min_size=threshold, unique=True))
    assert shamir.combine({x: shares[x] for x in some}, threshold=threshold) == secret


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, shamir.FIELD - 1), min_size=1, max_size=12, unique=True), st.integers(1, 40), st.data())
def test_a_share_is_the_polynomials_value(points: list[int], degree: int, data: st.DataObject) -> None:
    """Also where points are as large as the field, and where every coefficient is the largest."""
    element = st.one_of(st.integers(0, shamir.FIELD - 1), st.just(shamir.FIELD - 1))
    coefficients = data.draw(st.lists(element, min_size=degree, max_size=degree))
    for point in points:
        value = sum(c * pow(point, k, shamir.FIELD) for k, c in enumerate(coefficients)) % shamir.FIELD
        assert shamir._value_at(point, coefficients) == value
    weights = shamir._weights_at_zero(points)
    for k in range(len(points)):  # of the value at zero of every power that so many points determine
        assert sum(w * pow(x, k, shamir.FIELD) for w, x in zip(weights, points, strict=True)) % shamir.FIELD == (k == 0)


def test_fewer_shares_fit_any_secret() -> None:
    """With one share short, every other secret has a last share that makes it."""
    secret, other = os.urandom(32), os.urandom(32)
    shares = shamir.split(secret, threshold=3, points=[1, 2, 3], entropy=os.urandom)
    weights = shamir._weights_at_zero([1, 2, 3])
    known = sum(int.from_bytes(shares[x], "big") * weights[i] for i, x in enumerate((1, 2)))
    missing = (int.from_bytes(other, "big") - known) * pow(weights[2], -1, shamir.FIELD) % shamir.FIELD
    assert shamir.combine({**shares, 3: missing.to_bytes(66, "big")}, threshold=3) == other


def test_shares_do_not_repeat_and_hold_no_part_of_the_secret() -> None:
    one, other = (shamir.split(bytes(32), threshold=2, points=[1, 2], entropy=os.urandom) for _ in range(2))
    assert not set(one.values()) & set(other.values())
    assert all(int.from_bytes(share, "big") for share in one.values())


@pytest.mark.parametrize("points", [[0, 1, 2], [1, 1, 2], [-1, 2, 3], [1, 2, shamir.FIELD]])
def test_a_share_at_zero_would_be_the_secret(points: list[int]) -> None:
    with pytest.raises(ValueError, match="distinct and at least 1"):
        shamir.split(bytes(32), threshold=2, points=points, entropy=os.urandom)


def test_what_are_no_shares() -> None:
    shares = shamir.split(bytes(31) + b"\x01", threshold=2, points=[1, 2, 3], entropy=os.urandom)
    with pytest.raises(ValueError, match="1 shares, 2 are needed"):
        shamir.combine({1: shares[1]}, threshold=2)
    for false in (b"\xff" * 66, shares[2][:-1], b""):
        with pytest.raises(ValueError, match="not a share"):
            shamir.combine({1: shares[1], 2: false}, threshold=2)
    assert shamir.combine({1: shares[1], 2: os.urandom(65).rjust(66, b"\0")}, threshold=2) is None
    with pytest.raises(ValueError, match="threshold"):
        shamir.split(bytes(32), threshold=4, points=[1, 2, 3], entropy=os.urandom)
    with pytest.raises(ValueError, match="32 bytes"):
        shamir.split(bytes(31), threshold=1, points=[1], entropy=os.urandom)


def test_the_one_draw_that_is_no_field_element_is_drawn_again() -> None:
    draws = [b"\xff" * 66, bytes(65) + b"\x05"]
    assert shamir._element(lambda count: draws.pop(0)) == 5
