"""Masks: the keys two sites agree on, and the words that AES-256-CTR makes of a key.

A mask is added modulo 2³² or 2¹⁶ and taken away again exactly. Every key is of one
session, one pair and one use, so the counter starts at zero and never repeats
under a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from common.errors import TrustError
from common.secagg.encoding import encode

_CHUNK_BYTES = 1 << 20
_ZEROS = bytes(_CHUNK_BYTES)
_NONCE = bytes(12)


@dataclass(frozen=True)
class KeyUse:
    """What a derived key is for: HKDF's whole `info`.

    Attributes:
        label: `mask`, `self` or `share`.
        transcript: of the session so far, which holds its terms, its keys and, for masks, who masks.
        first, second: the two sites; for `mask` in sorted order, for `share` the dealer first.
    """

    label: str
    transcript: bytes
    first: str
    second: str


def derive(secret: bytes, use: KeyUse) -> bytes:
    """32 bytes by HKDF-SHA256."""
    return HKDF(SHA256(), 32, None, encode(use)).derive(secret)


class Agreeing:
    """One private X25519 key at work: with each public key it makes a secret that both ends of the pair know."""

    def __init__(self, private: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(private)

    @property
    def public(self) -> bytes:
        """Raw public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def secret(self, public: bytes) -> bytes:
        """What `derive` takes; raises TrustError where `public` is of low order."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise TrustError("a public key makes no secret: it is of low order") from error

    def key(self, public: bytes, use: KeyUse) -> bytes:
        """The key both ends of a pair derive; raises as `secret` does."""
        return derive(self.secret(public), use)


def agree(private: bytes, public: bytes, use: KeyUse) -> bytes:
    """`Agreeing.key` for one pair only."""
    return Agreeing(private).key(public, use)


def mask_use(transcript: bytes, one: str, other: str) -> KeyUse:
    return KeyUse("mask", transcript, min(one, other), max(one, other))


def mask_sign(one: str, other: str) -> int:
    """Whether `one` adds the mask it has with `other` (1) or takes it away (−1)."""
    return 1 if one < other else -1


def public_of(private: bytes) -> bytes:
    return Agreeing(private).public


def contributes(public: bytes) -> bool:
    """Whether an X25519 public key can make a secret: 32 bytes, not of low order.

    A point of low order gives zero with every private key and another point with none, so this is what any
    exchange with the key would say (RFC 7748, section 6.1); it takes none, since every site looks at every key.
    """
    return len(public) == 32 and (int.from_bytes(public, "little") & _COORDINATE) % _PRIME not in _LOW_ORDER


_PRIME = 2**255 - 19
_COORDINATE = 2**255 - 1
"""The bits of a public key that X25519 reads."""

_LOW_ORDER = frozenset(
    (
        0,  # of order 2, on the curve and on its twist
        1,  # of order 4
        _PRIME - 1,  # of order 4, on the twist
        0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,  # of order 8
        0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,  # of order 8
    )
)
"""The coordinates u of all points whose order divides 8."""


def add_mask(words_D: np.ndarray, key: bytes, *, sign: int = 1) -> None:
    """Add (sign 1) or take away (−1) the key's words in place, 1 MiB at a time; `words_D` is uint32 or uint16."""
    size = words_D.dtype.itemsize
    keystream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    drawn = bytearray(min(_CHUNK_BYTES, max(words_D.nbytes, size)) + 16)
    block = np.frombuffer(drawn, f"<u{size}", count=(len(drawn) - 16) // size)
    apply = np.add if sign > 0 else np.subtract
    for start in range(0, len(words_D), len(block)):
        part = words_D[start : start + len(block)]
        keystream.update_into(memoryview(_ZEROS)[: size * len(part)], drawn)
        apply(part, block[: len(part)], out=part)


def mask(key: bytes, dimension: int) -> np.ndarray:
    """The key's words alone, uint32."""
    words_D = np.zeros(dimension, np.uint32)
    add_mask(words_D, key)
    return words_D


def keystream(key: bytes, count: int) -> bytes:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(count))


def lock(key: bytes, plaintext: bytes, *, context: bytes) -> bytes:
    """ChaCha20-Poly1305 under a key that locks one message only."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, plaintext, context)


def unlock(key: bytes, ciphertext: bytes, *, context: bytes) -> bytes | None:
    """The plaintext; None where the ciphertext is not what `lock` made with this key and context."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, ciphertext, context)
    except (InvalidTag, ValueError):
        return None
