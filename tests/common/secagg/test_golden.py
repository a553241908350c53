"""Masks, keys, shares, rounding and sketches against vectors that other libraries computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.secagg import masking, shamir
from common.secagg.ring import Ring
from common.secagg.rotation import Rotation
from common.secagg.sketch import Sketch

GOLDEN = Path(__file__).parents[2] / "golden" / "secagg.json"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def test_mask_words(golden: dict[str, Any]) -> None:
    key = bytes.fromhex(golden["mask"]["key"])
    assert masking.mask(key, 9).tolist() == golden["mask"]["words"]
    words_D = np.arange(9, dtype=np.uint32)
    masking.add_mask(words_D, key, sign=-1)
    assert words_D.tolist() == [(i - word) % 2**32 for i, word in enumerate(golden["mask"]["words"])]


def test_narrow_mask_words(golden: dict[str, Any]) -> None:
    words_D = np.zeros(9, np.uint16)
    masking.add_mask(words_D, bytes.fromhex(golden["narrow_mask"]["key"]))
    assert words_D.tolist() == golden["narrow_mask"]["words"]


def test_agreed_keys(golden: dict[str, Any]) -> None:
    found = {name: bytes.fromhex(value) for name, value in golden["agree"].items()}
    use = masking.mask_use(found["transcript"], "b", "a")
    assert masking.agree(found["private"], found["public"], use) == found["mask_key"]
    assert masking.agree(found["other_private"], found["other_public"], use) == found["mask_key"]
    assert masking.public_of(found["private"]) == found["other_public"]


def test_locked_shares(golden: dict[str, Any]) -> None:
    found = {name: bytes.fromhex(value) for name, value in golden["lock"].items()}
    assert masking.lock(found["key"], b"two shares", context=found["context"]) == found["ciphertext"]
    assert masking.unlock(found["key"], found["ciphertext"], context=found["context"]) == b"two shares"
    assert masking.unlock(found["key"], found["ciphertext"], context=b"another") is None
    assert masking.unlock(found["key"], b"", context=found["context"]) is None


def test_shares(golden: dict[str, Any]) -> None:
    found = golden["shamir"]
    secret = bytes.fromhex(found["secret"])
    drawn = [bytes.fromhex(coefficient) for coefficient in found["coefficients"]]
    split = shamir.split(secret, threshold=4, points=[1, 2, 3, 7, 20], entropy=lambda count: drawn.pop(0))
    assert {str(x): share.hex() for x, share in split.items()} == found["shares"]
    for left_out in split:
        some = {x: share for x, share in split.items() if x != left_out}
        assert shamir.combine(some, threshold=4) == secret


def test_rounded_words(golden: dict[str, Any]) -> None:
    found = golden["ring"]
    ring = Ring(found["clip"], found["total"])
    words = ring.quantise(np.array(found["values"]), weight=found["weight"], key=bytes.fromhex(found["key"]))
    assert words.tolist() == found["words"]


def test_turned_and_rounded_narrow_words(golden: dict[str, Any]) -> None:
    found = golden["narrow_ring"]
    rotation = Rotation(bytes.fromhex(found["seed"]), len(found["values"]))
    assert rotation.apply(np.array(found["values"])).tolist() == found["turned"]
    ring = Ring(found["clip"], found["total"], rotation)
    words = ring.quantise(np.array(found["values"]), weight=found["weight"], key=bytes.fromhex(found["key"]))
    assert words.tolist() == found["words"]


def test_projected_words(golden: dict[str, Any]) -> None:
    found = golden["sketch"]
    words_D = masking.mask(bytes.fromhex(found["words_key"]), 500)
    for buckets, expected in found["projected"].items():
        assert Sketch(bytes.fromhex(found["seed"]), 500, int(buckets)).apply(words_D).tolist() == expected
