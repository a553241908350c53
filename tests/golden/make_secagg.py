"""Writes `secagg.json`: masks, keys, shares and rounding computed without a line of `common.secagg`.

AES-CTR, HKDF, X25519 and ChaCha20-Poly1305 are PyCryptodome's, shares are evaluated and
put together here by another method than the product's. Run from the repository's root:

    python tests/golden/make_secagg.py
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from fractions import Fraction
from pathlib import Path

from Crypto.Cipher import AES, ChaCha20_Poly1305
from Crypto.Hash import SHA256
from Crypto.Protocol.DH import import_x25519_private_key, import_x25519_public_key, key_agreement
from Crypto.Protocol.KDF import HKDF
from Crypto.PublicKey import ECC

PRIME = 2**521 - 1


def text(value: str) -> bytes:
    return struct.pack(">I", len(value.encode())) + value.encode()


def raw(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def stream(key: bytes, count: int) -> bytes:
    return AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0).encrypt(bytes(count))


def mask_words(key: bytes, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}I", stream(key, 4 * count)))


def key_use(label: str, transcript: bytes, first: str, second: str) -> bytes:
    return text("KeyUse") + text(label) + raw(transcript) + text(first) + text(second)


def x25519(private: bytes, public: bytes) -> bytes:
    return key_agreement(
        static_priv=import_x25519_private_key(private), static_pub=import_x25519_public_key(public), kdf=lambda z: z
    )


def public_of(private: bytes) -> bytes:
    return ECC.construct(curve="Curve25519", seed=private).public_key().export_key(format="raw")


def shares(secret: int, coefficients: list[int], points: list[int]) -> dict[str, str]:
    terms = [secret, *coefficients]
    return {
        str(x): (sum(c * pow(x, power, PRIME) for power, c in enumerate(terms)) % PRIME).to_bytes(66, "big").hex()
        for x in points
    }


def interpolated(found: dict[int, int]) -> int:
    """The polynomial's value at 0 by Newton's divided differences."""
    xs = sorted(found)
    table = [found[x] for x in xs]
    for order in range(1, len(xs)):
        for row in range(len(xs) - 1, order - 1, -1):
            table[row] = (table[row] - table[row - 1]) * pow(xs[row] - xs[row - order], -1, PRIME) % PRIME
    value = 0
    for x, difference in zip(reversed(xs), reversed(table), strict=True):
        value = (value * -x + difference) % PRIME
    return value


def rounded(values: list[float], *, clip: float, total: int, weight: int, key: bytes) -> list[int]:
    """floor(w u · 2³⁰ / (C W) + U) in rational arithmetic, U from the key's words; the values are within the clip."""
    draws = mask_words(key, len(values))
    scale = Fraction(2**30) / (Fraction(clip) * total)
    return [
        math.floor(Fraction(v) * weight * scale + Fraction(draw, 2**32)) % 2**32
        for v, draw in zip(values, draws, strict=True)
    ]


def key_signs(seed: bytes, turn: int, count: int) -> list[int]:
    key = hashlib.sha256(text("_Signs") + raw(seed) + struct.pack(">Q", turn)).digest()
    drawn = stream(key, (count + 7) // 8)
    return [-1 if drawn[i // 8] >> (7 - i % 8) & 1 else 1 for i in range(count)]


def turned(values: list[Fraction], *, seed: bytes) -> list[Fraction]:
    """The rotation in rational arithmetic; its block is a power of four, so that its root is rational."""
    block = 4 ** int(math.log(len(values), 4))
    for turn, start in enumerate((0, len(values) - block)):
        flipped = [v * s for v, s in zip(values[start : start + block], key_signs(seed, turn, block), strict=True)]
        spread = [
            sum(v * (-1) ** (row & column).bit_count() for column, v in enumerate(flipped)) / math.isqrt(block)
            for row in range(block)
        ]
        values = [*values[:start], *spread, *values[start + block :]]
    return values


def narrow(values: list[float], *, clip: float, total: int, weight: int, key: bytes, seed: bytes) -> list[int]:
    """As `rounded`, of the rotated values within 6 C / √B, in steps of which 2¹⁵ − 1 − W are the range of the sum."""
    block = 4 ** int(math.log(len(values), 4))
    largest = Fraction(6) * Fraction(clip) / math.isqrt(block)
    scale = Fraction(2**15 - 1 - total) / (largest * total)
    cut = [max(-largest, min(largest, v)) for v in turned([Fraction(v) for v in values], seed=seed)]
    draws = mask_words(key, len(values))
    return [math.floor(v * weight * scale + Fraction(d, 2**32)) % 2**16 for v, d in zip(cut, draws, strict=True)]


def projected(seed: bytes, words: list[int], buckets: int) -> list[int]:
    sums = []
    for table in range(4):
        key = hashlib.sha256(text("_Table") + raw(seed) + struct.pack(">Q", table)).digest()
        sums_B = [0] * buckets
        for byte, word in zip(stream(key, len(words)), words, strict=True):
            sums_B[byte % buckets] += -word if byte >= 128 else word
        sums += [value % 2**32 for value in sums_B]
    return sums


def main() -> None:
    one, other = bytes(range(32)), bytes(range(100, 132))
    transcript, key = hashlib.sha256(b"transcript").digest(), hashlib.sha256(b"key").digest()
    use = key_use("mask", transcript, "a", "b")
    agreed = HKDF(x25519(one, public_of(other)), 32, b"", SHA256, context=use)
    locker = ChaCha20_Poly1305.new(key=key, nonce=bytes(12))
    locker.update(transcript)
    ciphertext, tag = locker.encrypt_and_digest(b"two shares")
    secret = int.from_bytes(hashlib.sha256(b"secret").digest(), "big")
    coefficients = [int.from_bytes(hashlib.sha512(bytes([i])).digest() + b"\x01", "big") % PRIME for i in range(3)]
    dealt = shares(secret, coefficients, [1, 2, 3, 7, 20])
    put_together = interpolated({int(x): int(y, 16) for x, y in list(dealt.items())[1:]})
    assert put_together == secret
    values = [0.5, -0.25, 0.0, 1e-7, -1e-7, 0.1, -0.3333333432674408]
    seed = hashlib.sha256(b"seed").digest()
    dyadic = [(i * i % 23 - 11) / 256 for i in range(29)]
    words = mask_words(hashlib.sha256(b"words").digest(), 500)
    vectors = {
        "mask": {"key": key.hex(), "words": mask_words(key, 9)},
        "narrow_mask": {"key": key.hex(), "words": list(struct.unpack("<9H", stream(key, 18)))},
        "agree": {"private": one.hex(), "public": public_of(other).hex(), "transcript": transcript.hex(),
                  "mask_key": agreed.hex(), "other_public": public_of(one).hex(), "other_private": other.hex()},
        "lock": {"key": key.hex(), "context": transcript.hex(), "ciphertext": (ciphertext + tag).hex()},
        "shamir": {"secret": secret.to_bytes(32, "big").hex(), "threshold": 4, "shares": dealt,
                   "coefficients": [c.to_bytes(66, "big").hex() for c in coefficients]},
        "ring": {"values": values, "clip": 0.75, "total": 12, "weight": 2, "key": key.hex(),
                 "words": rounded(values, clip=0.75, total=12, weight=2, key=key)},
        "narrow_ring": {"values": dyadic, "clip": 0.75, "total": 12, "weight": 2, "key": key.hex(), "seed": seed.hex(),
                        "turned": [float(v) for v in turned([Fraction(v) for v in dyadic], seed=seed)],
                        "words": narrow(dyadic, clip=0.75, total=12, weight=2, key=key, seed=seed)},
        "sketch": {"seed": key.hex(), "words_key": hashlib.sha256(b"words").hexdigest(),
                   "projected": {str(b): projected(key, words, b) for b in (128, 64, 32)}},
    }  # fmt: skip
    Path(__file__).with_name("secagg.json").write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    main()
