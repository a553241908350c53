"""One encoding for one value, and nothing else decodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import TrustError
from common.secagg.encoding import decode, digest, encode, kind_of


@dataclass(frozen=True)
class Inner:
    name: str
    raw: bytes


@dataclass(frozen=True)
class Outer:
    count: int
    share: float
    inner: Inner
    many: tuple[Inner, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Twin:
    count: int
    share: float
    inner: Inner
    many: tuple[Inner, ...]
    names: tuple[str, ...]


INNER = st.builds(Inner, st.text(max_size=5), st.binary(max_size=5))
FIELDS = (
    st.integers(0, 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    INNER,
    st.lists(INNER, max_size=3).map(tuple),
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
)
OUTER = st.builds(Outer, *FIELDS)
SAMPLE = Outer(1, 0.5, Inner("a", b"b"), (Inner("", b""),), ("x", "y"))


@given(OUTER)
def test_what_is_encoded_decodes_to_itself(value: Outer) -> None:
    assert decode(Outer, encode(value)) == value
    assert encode(decode(Outer, encode(value))) == encode(value)


@given(OUTER, OUTER)
def test_two_values_have_two_encodings(one: Outer, other: Outer) -> None:
    if repr(one) != repr(other):  # −0.0 equals 0.0 and is another number
        assert encode(one) != encode(other)


@given(st.binary(max_size=80))
def test_other_bytes_do_not_decode(data: bytes) -> None:
    with pytest.raises(TrustError):
        decode(Outer, data)


@given(st.data())
def test_bytes_that_differ_decode_to_another_value_or_not_at_all(data: st.DataObject) -> None:
    whole = bytearray(encode(SAMPLE))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(Outer, bytes(whole))
    except TrustError:
        return
    assert encode(found) == bytes(whole) and found != SAMPLE


def test_bytes_left_over_or_missing_are_refused() -> None:
    whole = encode(SAMPLE)
    for data in (whole + b"\x00", whole[:-1], b"", whole[1:]):
        with pytest.raises(TrustError):
            decode(Outer, data)


def test_a_length_beyond_the_bytes_is_refused_before_anything_is_made() -> None:
    whole = encode(SAMPLE)
    with pytest.raises(TrustError):
        decode(Outer, whole[:-18] + b"\xff\xff\xff\xff" + whole[-14:])


def test_types_are_part_of_the_encoding() -> None:
    """The prototype's hash took ("1", "2") and the bytes of its text for the same."""
    twin = Twin(**SAMPLE.__dict__)
    assert digest(twin) != digest(SAMPLE) and kind_of(encode(twin)) == "Twin"
    with pytest.raises(TrustError, match="Outer"):
        decode(Outer, encode(twin))


@pytest.mark.parametrize(
    "changed",
    [
        {"count": np.int64(1)},
        {"count": True},
        {"count": 1.0},
        {"share": 1},
        {"share": np.float64(0.5)},
        {"names": ["x"]},
        {"names": (b"x",)},
        {"inner": Outer},
        {"inner": Inner("a", "b")},  # type: ignore[arg-type]
        {"inner": Inner("a", bytearray(b"b"))},  # type: ignore[arg-type]
    ],
)
def test_no_type_is_guessed(changed: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        encode(replace(SAMPLE, **changed))


@pytest.mark.parametrize("changed", [{"count": -1}, {"count": 2**64}, {"share": float("nan")}, {"share": float("inf")}])
def test_numbers_out_of_range_have_no_encoding(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not"):
        encode(replace(SAMPLE, **changed))
