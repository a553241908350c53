"""Shamir's secret sharing of 32 bytes over the field of 2⁵²¹ − 1 elements.

Any `threshold` shares give the secret; fewer say nothing about it. A share is not
authenticated here: dealers sign a commitment to each (`common.secagg.messages`).

Shamir 1979, "How to share a secret".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod

FIELD = 2**521 - 1
SHARE_BYTES = 66
SECRET_BYTES = 32
_UNREDUCED_BITS = 2 * 521


def split(secret: bytes, *, threshold: int, points: Sequence[int], entropy: Callable[[int], bytes]) -> dict[int, bytes]:
    """One share per point; `points` are distinct and at least 1, since the polynomial at 0 is the secret.

    Args:
        entropy: secret random bytes by their number.
    Raises:
        ValueError: fewer points than the threshold, or a point that may not be.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold {threshold} of {len(points)} shares")
    if len(set(points)) != len(points) or not all(1 <= point < FIELD for point in points):
        raise ValueError("points must be distinct and at least 1")
    coefficients = [int.from_bytes(secret, "big"), *(_element(entropy) for _ in range(threshold - 1))]
    return {point: _value_at(point, coefficients).to_bytes(SHARE_BYTES, "big") for point in points}


def combine(shares: Mapping[int, bytes], *, threshold: int) -> bytes | None:
    """The secret from the first `threshold` shares by point; None where they are not shares of any 32 bytes.

    Raises:
        ValueError: too few shares, or one that is no field element.
    """
    points = sorted(shares)[:threshold]
    if len(points) < threshold:
        raise ValueError(f"{len(points)} shares, {threshold} are needed")
    values = [int.from_bytes(shares[point], "big") for point in points]
    if points[0] < 1 or not all(is_share(shares[point]) for point in points):
        raise ValueError("not a share")
    secret = sum(value * weight for value, weight in zip(values, _weights_at_zero(points), strict=True)) % FIELD
    return secret.to_bytes(SHARE_BYTES, "big")[-SECRET_BYTES:] if secret < 1 << (8 * SECRET_BYTES) else None


def is_share(data: bytes) -> bool:
    """Whether these bytes are an element of the field."""
    return len(data) == SHARE_BYTES and int.from_bytes(data, "big") < FIELD


def _element(entropy: Callable[[int], bytes]) -> int:
    """A uniform field element: 521 bits, drawn again in the one case that is none."""
    while True:
        drawn = int.from_bytes(entropy(SHARE_BYTES), "big") & FIELD
        if drawn != FIELD:
            return drawn


def _value_at(point: int, coefficients: Sequence[int]) -> int:
    """The polynomial's value; points are small numbers, so one reduction serves several steps of Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = value * point + coefficient
        if value >> _UNREDUCED_BITS:
            value %= FIELD
    return value % FIELD


def _weights_at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange weights of the polynomial's value at 0: Π other / Π (other − point) over the other points."""
    below = [point * prod(other - point for other in points if other != point) % FIELD for point in points]
    above = prod(points) % FIELD
    return [above * inverse % FIELD for inverse in _inverses(below)]


def _inverses(elements: Sequence[int]) -> list[int]:
    """Of each element, none of them zero; one inversion for all (Montgomery 1987, section 10.3.1)."""
    before = list(accumulate(elements, _times, initial=1))
    rest, inverses = pow(before.pop(), -1, FIELD), []
    for element, product in zip(reversed(elements), reversed(before), strict=True):
        inverses.append(rest * product % FIELD)
        rest = rest * element % FIELD
    return inverses[::-1]


def _times(one: int, other: int) -> int:
    return one * other % FIELD
