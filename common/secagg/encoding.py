"""One byte string for one value: the encoding under every signature, hash and key of a session.

A record is a frozen dataclass of whole numbers, finite floats, texts, bytes, other
records, and tuples of one of these. Every field has one encoding and every
encoding one value: nothing is optional, nothing is sorted on the way, no type is
guessed. What does not decode exactly is refused.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from common.errors import TrustError

T = TypeVar("T")

_LENGTH = struct.Struct(">I")
_WHOLE = struct.Struct(">Q")
_FLOAT = struct.Struct(">d")


def encode(record: Any) -> bytes:
    """The bytes of `record`, led by the name of its type.

    Raises:
        TypeError: a field does not hold exactly what its annotation says; a NumPy number is not a whole number.
        ValueError: a number is out of range.
    """
    parts: list[bytes] = []
    _write(str, type(record).__name__, parts)
    _write(type(record), record, parts)
    return b"".join(parts)


def decode(kind: type[T], data: bytes) -> T:
    """The `kind` that `encode` made `data` from; raises TrustError for any other bytes."""
    try:
        name, start = _read(str, data, 0)
        if name != kind.__name__:
            raise ValueError(f"expected {kind.__name__}")
        record, end = _read(kind, data, start)
        if end != len(data):
            raise ValueError("bytes are left over")
    except (ValueError, struct.error) as error:
        raise TrustError(f"not the encoding of a {kind.__name__}") from error
    return record


def kind_of(data: bytes) -> str:
    """The name of the type that `data` says it encodes; raises TrustError where it says nothing."""
    try:
        return str(_read(str, data, 0)[0])
    except (ValueError, struct.error) as error:
        raise TrustError("not an encoded record") from error


def digest(record: Any) -> bytes:
    """SHA-256 of `encode`, 32 bytes."""
    return hashlib.sha256(encode(record)).digest()


@lru_cache(maxsize=64)
def _item(kind: Any) -> Any:
    """What a tuple is of; None for everything else."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


@lru_cache(maxsize=64)
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _write(kind: Any, value: Any, parts: list[bytes]) -> None:
    item = _item(kind)
    if item is not None:
        if type(value) is not tuple:
            raise TypeError(f"expected a tuple, got {type(value).__name__}")
        parts.append(_LENGTH.pack(len(value)))
        for one in value:
            _write(item, one, parts)
        return
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    if kind is int:
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{value} is not within 64 bits")
        parts.append(_WHOLE.pack(value))
    elif kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{value} is not finite")
        parts.append(_FLOAT.pack(value))
    elif kind is bytes or kind is str:
        raw = value if kind is bytes else value.encode()
        parts += (_LENGTH.pack(len(raw)), raw)
    elif is_dataclass(kind):
        for name, hint in _fields(kind):
            _write(hint, getattr(value, name), parts)
    else:
        raise TypeError(f"{kind} has no encoding")


def _read(kind: Any, data: bytes, start: int) -> tuple[Any, int]:
    """The value at `start` and where it ends; raises ValueError or struct.error where there is none."""
    of = _item(kind)
    if of is not None:
        (count,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if count > len(data) - start:  # every item takes a byte at least
            raise ValueError("more items than bytes")
        items = []
        for _ in range(count):
            item, start = _read(of, data, start)
            items.append(item)
        return tuple(items), start
    if kind is int:
        return _WHOLE.unpack_from(data, start)[0], start + _WHOLE.size
    if kind is float:
        (number,) = _FLOAT.unpack_from(data, start)
        if not math.isfinite(number):
            raise ValueError("a number is not finite")
        return number, start + _FLOAT.size
    if kind is bytes or kind is str:
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if length > len(data) - start:
            raise ValueError("cut short")
        raw = data[start : start + length]
        return (raw if kind is bytes else raw.decode()), start + length
    values = []
    for _, hint in _fields(kind):
        value, start = _read(hint, data, start)
        values.append(value)
    return kind(*values), start
