"""One byte string for one value: the encoding under every signature, hash and key of a session.

A record is a frozen dataclass of whole numbers, finite floats, texts, bytes, other
records, and tuples of one of these. Every field has one encoding and every
encoding one value: nothing is optional, nothing is sorted on the way, no type is
guessed. What does not decode exactly is refused.

A session of 500 sites encodes millions of records, so how a type is written and read
is worked out once, from its annotations.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
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
    kind: Any = type(record)
    parts = [_title(kind)]
    _codec(kind).write(record, parts)
    return b"".join(parts)


def decode(kind: type[T], data: bytes) -> T:
    """The `kind` that `encode` made `data` from; raises TrustError for any other bytes."""
    of: Any = kind
    title = _title(of)
    try:
        if not data.startswith(title):
            raise ValueError(f"expected {kind.__name__}")
        record, end = _codec(of).read(data, len(title))
        if end != len(data):
            raise ValueError("bytes are left over")
    except (ValueError, struct.error) as error:
        raise TrustError(f"not the encoding of a {kind.__name__}") from error
    found: T = record
    return found


def kind_of(data: bytes) -> str:
    """The name of the type that `data` says it encodes; raises TrustError where it says nothing."""
    try:
        return str(_read_text(data, 0)[0])
    except (ValueError, struct.error) as error:
        raise TrustError("not an encoded record") from error


def digest(record: Any) -> bytes:
    """SHA-256 of `encode`, 32 bytes."""
    return hashlib.sha256(encode(record)).digest()


@dataclass(frozen=True)
class _Codec:
    """How values of one type are written and read.

    Attributes:
        write: appends a value's bytes; raises TypeError and ValueError as `encode` does.
        read: the value at a place in the data and where it ends; raises ValueError or struct.error where there is none.
    """

    write: Callable[[Any, list[bytes]], None]
    read: Callable[[bytes, int], tuple[Any, int]]


@cache
def _title(kind: type) -> bytes:
    parts: list[bytes] = []
    _write_text(kind.__name__, parts)
    return b"".join(parts)


@cache
def _codec(kind: Any) -> _Codec:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if get_origin(kind) is tuple:
        return _tuple_of(_codec(get_args(kind)[0]))
    if is_dataclass(kind) and isinstance(kind, type):
        return _record(kind)
    raise TypeError(f"{kind} has no encoding")


def _record(kind: type) -> _Codec:
    hints = get_type_hints(kind)
    codecs = [(field.name, _codec(hints[field.name])) for field in fields(kind)]
    writers = tuple((name, codec.write) for name, codec in codecs)
    readers = tuple(codec.read for _, codec in codecs)

    def write(value: Any, parts: list[bytes]) -> None:
        if type(value) is not kind:
            raise _mistaken(kind.__name__, value)
        for name, write_field in writers:
            write_field(getattr(value, name), parts)

    def read(data: bytes, start: int) -> tuple[Any, int]:
        values = []
        for read_field in readers:
            value, start = read_field(data, start)
            values.append(value)
        return kind(*values), start

    return _Codec(write, read)


def _tuple_of(item: _Codec) -> _Codec:
    write_item, read_item = item.write, item.read

    def write(value: Any, parts: list[bytes]) -> None:
        if type(value) is not tuple:
            raise _mistaken("a tuple", value)
        parts.append(_LENGTH.pack(len(value)))
        for one in value:
            write_item(one, parts)

    def read(data: bytes, start: int) -> tuple[Any, int]:
        (count,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if count > len(data) - start:  # every item takes a byte at least
            raise ValueError("more items than bytes")
        items = []
        for _ in range(count):
            one, start = read_item(data, start)
            items.append(one)
        return tuple(items), start

    return _Codec(write, read)


def _write_whole(value: Any, parts: list[bytes]) -> None:
    if type(value) is not int:
        raise _mistaken("int", value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is not within 64 bits")
    parts.append(_WHOLE.pack(value))


def _read_whole(data: bytes, start: int) -> tuple[Any, int]:
    return _WHOLE.unpack_from(data, start)[0], start + _WHOLE.size


def _write_float(value: Any, parts: list[bytes]) -> None:
    if type(value) is not float:
        raise _mistaken("float", value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    parts.append(_FLOAT.pack(value))


def _read_float(data: bytes, start: int) -> tuple[Any, int]:
    (number,) = _FLOAT.unpack_from(data, start)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number, start + _FLOAT.size


def _write_bytes(value: Any, parts: list[bytes]) -> None:
    if type(value) is not bytes:
        raise _mistaken("bytes", value)
    parts += (_LENGTH.pack(len(value)), value)


def _read_bytes(data: bytes, start: int) -> tuple[Any, int]:
    (length,) = _LENGTH.unpack_from(data, start)
    start += _LENGTH.size
    end = start + length
    if end > len(data):
        raise ValueError("cut short")
    return data[start:end], end


def _write_text(value: Any, parts: list[bytes]) -> None:
    if type(value) is not str:
        raise _mistaken("str", value)
    raw = value.encode()
    parts += (_LENGTH.pack(len(raw)), raw)


def _read_text(data: bytes, start: int) -> tuple[Any, int]:
    raw, end = _read_bytes(data, start)
    return raw.decode(), end


def _mistaken(expected: str, value: Any) -> TypeError:
    return TypeError(f"expected {expected}, got {type(value).__name__}")


_PLAIN = {
    int: _Codec(_write_whole, _read_whole),
    float: _Codec(_write_float, _read_float),
    bytes: _Codec(_write_bytes, _read_bytes),
    str: _Codec(_write_text, _read_text),
}
