"""Sealing and opening updates: what honest sites send, and a table of what others might."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from safetensors.numpy import save

from common.errors import PrivacyError, RoundError, TrustError
from common.identity import SealingKey, SigningKey, canonical
from common.plan import RoundPlan, Training, sign_plan, verify_plan
from common.update import NOT_CHARGED, LedgerHead, PrivateUpdate, SealedUpdate, open_update, seal_bytes, seal_update

SITE, OTHER = SigningKey(Ed25519PrivateKey.generate()), SigningKey(Ed25519PrivateKey.generate())
AGGREGATOR = SigningKey(Ed25519PrivateKey.generate())
SEALING = SealingKey(X25519PrivateKey.generate())
SHAPES = {"a.lora_B.weight": (4, 2), "b.lora_B.weight": (3, 2)}
TRAINING = Training("dpo", "sgd", 30.0, 2, 0.5, 100.0, 0.1, {"beta": 0.1})


def plan(**changes: object) -> RoundPlan:
    base = RoundPlan(
        federation="test",
        round=1,
        planned_rounds=3,
        base_digest="0" * 64,
        adapter_version="v0",
        adapter_digest="1" * 64,
        training=TRAINING,
        lora_phase="B",
        clip_norm=2.0,
        weights={"site-1": 1, "site-2": 2},
        roster_digest="2" * 64,
        sealing_key=SEALING.public.hex(),
        deadline_s=1e9,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def tensors(norm: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    total = np.sqrt(sum((t.astype(np.float64) ** 2).sum() for t in drawn.values()))
    return {name: (t * (norm / total)).astype(np.float32) for name, t in drawn.items()}


ENTRY = "e" * 64
HEAD = LedgerHead.signed(3, ENTRY, SITE).encode()


def update(plan_digest: str, values: dict[str, np.ndarray]) -> PrivateUpdate:
    return PrivateUpdate(plan_digest, SHAPES, np.concatenate([values[n].reshape(-1) for n in SHAPES]), ENTRY)


def opened(sealed: SealedUpdate, current: RoundPlan) -> np.ndarray:
    return open_update(sealed, current, SHAPES, site_public=SITE.public, key=SEALING)


def test_an_honest_update_arrives_bit_for_bit() -> None:
    current, sent = plan(), tensors(2.0)
    sealed = seal_update(update(current.digest, sent), current, site="site-1", key=SITE, ledger_head=HEAD)
    np.testing.assert_array_equal(opened(sealed, current), np.concatenate([sent[n].reshape(-1) for n in SHAPES]))
    assert sent["a.lora_B.weight"].tobytes() not in sealed.ciphertext


def test_an_update_that_was_not_charged_shows_no_ledger() -> None:
    current, sent = plan(), tensors()
    assert opened(_raw(save(sent), current, entry=NOT_CHARGED, head=""), current).size == 14


def test_sealing_refuses_what_would_break_the_plan() -> None:
    current = plan()
    with pytest.raises(PrivacyError, match="another plan"):
        seal_update(update("f" * 64, tensors()), current, site="site-1", key=SITE, ledger_head=HEAD)
    with pytest.raises(PrivacyError, match="exceeds"):
        seal_update(update(current.digest, tensors(2.2)), current, site="site-1", key=SITE, ledger_head=HEAD)


def _raw(
    payload: bytes,
    current: RoundPlan,
    *,
    key: SigningKey = SITE,
    site: str = "site-1",
    entry: str = ENTRY,
    head: str = HEAD,
) -> SealedUpdate:
    return seal_bytes(payload, current, site=site, key=key, ledger_entry=entry, ledger_head=head)


def _head(sequence: int, *, key: SigningKey = SITE) -> str:
    return LedgerHead.signed(sequence, ENTRY, key).encode()


def _tampered() -> list[tuple[str, SealedUpdate, str]]:
    current, good = plan(), tensors()
    name = "a.lora_B.weight"
    nan = {**good, name: np.full(SHAPES[name], np.nan, np.float32)}
    huge = {**good, name: np.full(SHAPES[name], 3e38, np.float32)}
    fresh = _raw(save(good), current)
    return [
        ("norm", _raw(save(tensors(2.2)), current), "norm 2.2 exceeds"),
        ("overflowing norm", _raw(save(huge), current), "exceeds"),
        ("nan", _raw(save(nan), current), "not finite"),
        ("garbage", _raw(bytes(200), current), "not a safetensors"),
        ("empty", _raw(b"", current), "not a safetensors"),
        ("pickle", _raw(b"\x80\x04\x95" + bytes(50), current), "not a safetensors"),
        ("dtype", _raw(save({**good, name: good[name].astype(np.float64)}), current), "dtype float64"),
        ("complex", _raw(save({**good, name: good[name].view(np.int32)}), current), "dtype int32"),
        ("shape", _raw(save({**good, name: good[name].T.copy()}), current), "shape (2, 4)"),
        ("broadcast", _raw(save({**good, name: np.ones((1,), np.float32)}), current), "shape (1,)"),
        ("missing", _raw(save({name: good[name]}), current), "names differ"),
        ("extra", _raw(save({**good, "evil": good[name]}), current), "names differ"),
        ("size", _raw(bytes(10_000), current), "bytes, expected at most"),
        ("other key", _raw(save(good), current, key=OTHER), "does not verify"),
        ("other site", dataclasses.replace(fresh, site="site-2"), "does not verify"),
        ("other round", _raw(save(good), plan(round=2)), "another plan"),
        ("replayed", dataclasses.replace(_raw(save(good), plan(round=2)), plan_digest=current.digest), "verify"),
        ("ledger entry", dataclasses.replace(fresh, ledger_entry="f" * 64), "does not verify"),
        ("no ledger entry", dataclasses.replace(fresh, ledger_entry="x"), "names no ledger entry"),
        ("ledger head changed", dataclasses.replace(fresh, ledger_head=_head(4)), "does not verify"),
        ("no ledger head", _raw(save(good), current, head=""), "not the head of a privacy ledger"),
        ("ledger head without end", _raw(save(good), current, head=HEAD + "0" * 10_000), "not the head"),
        ("another site's ledger head", _raw(save(good), current, head=_head(3, key=OTHER)), "does not verify"),
        ("not charged, but a head", _raw(save(good), current, entry=NOT_CHARGED), "was not charged and shows"),
        ("ciphertext", dataclasses.replace(fresh, ciphertext=fresh.ciphertext[:-1] + b"x"), "does not verify"),
    ]


@pytest.mark.parametrize(("sealed", "expected"), [pytest.param(s, e, id=name) for name, s, e in _tampered()])
def test_a_tampered_update_is_refused_by_name(sealed: SealedUpdate, expected: str) -> None:
    with pytest.raises(RoundError) as error:
        opened(sealed, plan())
    assert expected in str(error.value)


def test_a_plan_has_one_encoding_whatever_numbers_it_was_made_of() -> None:
    assert plan(clip_norm=2, deadline_s=1000).payload == plan(clip_norm=2.0, deadline_s=1000.0).payload
    with pytest.raises(ValueError, match="deadline_s"):
        plan(deadline_s=float("nan"))


def test_a_plan_survives_the_wire_and_nothing_else_does() -> None:
    current = plan()
    signature = sign_plan(current, AGGREGATOR)
    assert verify_plan(current.payload, signature, aggregator=AGGREGATOR.public) == current
    with pytest.raises(TrustError):
        verify_plan(current.payload, signature, aggregator=OTHER.public)
    fields = dataclasses.asdict(current)
    for change in (
        {"extra": 1},
        {"lora_phase": "C"},
        {"clip_norm": -1.0},
        {"round": 9},
        {"weights": {"site-1": 3}},
        {"sealing_key": "zz"},
        {"base_digest": "0" * 63},
        {"planned_rounds": 10**9},
        {"training": {**fields["training"], "steps": 10**9}},
        {"round": "1"},
        {"training": {**fields["training"], "sampling_rate": 2.0}},
        {"training": {**fields["training"], "learning_rate": 0}},
    ):
        payload = canonical({**fields, **change})
        with pytest.raises(TrustError, match="malformed"):
            verify_plan(payload, AGGREGATOR.sign("round-plan", payload), aggregator=AGGREGATOR.public)
    with pytest.raises(TrustError, match="malformed"):
        verify_plan(b"[]", AGGREGATOR.sign("round-plan", b"[]"), aggregator=AGGREGATOR.public)
