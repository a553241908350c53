"""Keys of a party and what is done with them: sign, verify, seal, open.

Every signature covers a label and a canonical encoding, so a signature made for
one purpose cannot be replayed for another. Private keys lie in files that only
their owner can read; a key file with wider permissions is refused, not repaired.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from common.errors import TrustError

IDENTITY_LABEL, GOLDEN_LABEL = "identify", "golden"
"""Labels of the statements by which a node proves whose it is, and stands by its evidence."""

_SEALING_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def canonical(fields: Mapping[str, Any]) -> bytes:
    """The one JSON text of `fields`: sorted keys, no spaces, no NaN."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _signed_bytes(label: str, payload: bytes) -> bytes:
    return f"headwater/{label}\n".encode() + payload


@dataclass(frozen=True)
class SigningKey:
    """An Ed25519 private key that names its owner to the others."""

    private: Ed25519PrivateKey

    @property
    def public(self) -> bytes:
        """Raw public key, 32 bytes."""
        return self.private.public_key().public_bytes_raw()

    def sign(self, label: str, payload: bytes) -> bytes:
        return self.private.sign(_signed_bytes(label, payload))


SIGNATURE_BYTES = 64
"""Of Ed25519."""


def verify(public: bytes, label: str, payload: bytes, signature: bytes) -> None:
    """Raise TrustError unless `signature` is `public`'s over this label and payload."""
    if len(signature) != SIGNATURE_BYTES:  # before anything is made of it
        raise TrustError(f"the signature on this {label} does not verify")
    signed = _signed_bytes(label, payload)
    if _verified.holds(public, signed, signature):
        return
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError) as error:
        raise TrustError(f"the signature on this {label} does not verify") from error
    _verified.add(public, signed, signature)


class Verified:
    """Signatures that verified, so that the same one is not verified again; failures are never kept.

    Verifying is a pure function of public key, signed bytes and signature, and an entry is the SHA-256 of all three.
    The oldest entries go first. Made for simulations, where each of hundreds of sites verifies what all of them said.

    Args:
        at_most: entries; a site's own process keeps none.
    """

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self._entries: dict[bytes, None] = {}
        self._adding = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, public: bytes, signed: bytes, signature: bytes) -> bool:
        return bool(self._entries) and _entry(public, signed, signature) in self._entries

    def add(self, public: bytes, signed: bytes, signature: bytes) -> None:
        """For what has just verified, and nothing else."""
        if not self.at_most:
            return
        with self._adding:
            self._entries[_entry(public, signed, signature)] = None
            while len(self._entries) > self.at_most:
                del self._entries[next(iter(self._entries))]


def _entry(public: bytes, signed: bytes, signature: bytes) -> bytes:
    entry = hashlib.sha256(b"%d %d %d\n" % (len(public), len(signed), len(signature)))
    for part in (public, signed, signature):
        entry.update(part)
    return entry.digest()


_verified = Verified(0)


def remember_verified(at_most: int) -> None:
    """Let this process keep that many signatures that verified: for the sites of a simulation, which share it."""
    global _verified
    _verified = Verified(at_most)


@dataclass(frozen=True)
class SealingKey:
    """An X25519 private key: what is sealed to its public half only it can open (HPKE, RFC 9180)."""

    private: X25519PrivateKey

    @property
    def public(self) -> bytes:
        """Raw public key, 32 bytes."""
        return self.private.public_key().public_bytes_raw()

    def open(self, sealed: bytes, *, context: bytes) -> bytes:
        """Decrypt; raises TrustError where the bytes were sealed to another key or context, or altered."""
        try:
            return _SEALING_SUITE.decrypt(sealed, self.private, info=context)
        except (InvalidTag, ValueError) as error:
            raise TrustError("sealed bytes do not open: altered, or sealed to another key or round") from error


def seal(plaintext: bytes, *, recipient: bytes, context: bytes) -> bytes:
    """Encrypt to `recipient` (raw X25519 public key), bound to `context`."""
    return _SEALING_SUITE.encrypt(plaintext, X25519PublicKey.from_public_bytes(recipient), info=context)


def write_private(path: Path, data: bytes) -> None:
    """Create `path` whole, readable by its owner only; refuses to overwrite."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(partial)
    finally:
        partial.unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Replace `path` in one step: after a crash it holds the old bytes or the new ones."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_private(path: Path) -> bytes:
    """Read a secret file; raises TrustError if group or others have any access to it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise TrustError(f"{path} has mode {mode:04o}, others could read it; run: chmod 600 {path}")
    return path.read_bytes()


def load_or_create_signing_key(path: Path) -> SigningKey:
    """The Ed25519 key in `path`, made on first use."""
    if not path.exists():
        write_private(
            path,
            Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
    try:
        key = serialization.load_pem_private_key(read_private(path), password=None)
    except ValueError as error:
        raise TrustError(f"{path} holds no readable private key; restore it from its backup") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise TrustError(f"{path} is not an Ed25519 key")
    return SigningKey(key)


def load_or_create_secret(path: Path) -> bytes:
    """32 random bytes, made on first use: a symmetric key that never leaves its machine."""
    if not path.exists():
        write_private(path, os.urandom(32))
    secret = read_private(path)
    if len(secret) != 32:
        raise TrustError(f"{path} has {len(secret)} bytes, expected 32; restore it from its backup")
    return secret


def roster_digest(roster: Mapping[str, bytes]) -> str:
    """Digest of who takes part: site name to raw Ed25519 public key."""
    return sha256_hex(canonical({site: key.hex() for site, key in roster.items()}))
