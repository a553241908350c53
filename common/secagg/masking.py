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


def agree(private: bytes, public: bytes, use: KeyUse) -> bytes:
    """The key both ends of a pair derive; raises TrustError where `public` is of low order."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise TrustError("a public key makes no secret: it is of low order") from error
    return derive(shared, use)


def mask_use(transcript: bytes, one: str, other: str) -> KeyUse:
    return KeyUse("mask", transcript, min(one, other), max(one, other))


def mask_sign(one: str, other: str) -> int:
    """Whether `one` adds the mask it has with `other` (1) or takes it away (−1)."""
    return 1 if one < other else -1


def public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def contributes(public: bytes) -> bool:
    """Whether an X25519 public key can make a secret: 32 bytes, not of low order."""
    if len(public) != 32:
        return False
    try:
        X25519PrivateKey.from_private_bytes(_PROBE).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


_PROBE = b"\x01" * 32
"""Any private key: a point of low order gives zero with each of them, another point with none."""


def add_mask(words_D: np.ndarray, key: bytes, *, sign: int = 1) -> None:
    """Add (sign 1) or take away (−1) the key's words in place, 1 MiB at a time; `words_D` is uint32 or uint16."""
    size = words_D.dtype.itemsize
    keystream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    drawn = bytearray(_CHUNK_BYTES + 16)
    block = np.frombuffer(drawn, f"<u{size}", count=_CHUNK_BYTES // size)
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
