"""What a site, or somebody in its place, may send instead of an update: refused by name, state unchanged otherwise.

Every row goes through the production ClientApp, grid, validation and round log. The
other five sites' round must end as if the sixth had kept silent, and nothing of the
attack may remain in the log, the hub or the witness.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors.numpy import save

from aggregator.combine import OpenRound, validate
from aggregator.witness import Witness
from common.adapter import Adapter, LoraShape, initial_adapter
from common.errors import RoundError
from common.plan import RoundPlan
from common.update import NOT_CHARGED, LedgerHead, PrivateUpdate, SealedUpdate, seal_bytes
from deploy.local_grid import LocalGrid
from edge_node.client_app import make_client_app
from model_hub.hub import Hub
from tests.aggregator.stub import (
    Misbehave,
    StubSite,
    federation_of,
    head,
    home_of,
    log_of,
    new_hub,
    new_key,
    run,
    sends,
)

SHAPES = {"model.layers.0.self_attn.q_proj": (6, 5)}
GIGABYTE = 1 << 30
ATTACKER = "site-3"


@pytest.fixture(scope="module")
def start() -> Adapter:
    return initial_adapter(SHAPES, LoraShape(2, 4.0, ("q_proj",)), seed=0)


@pytest.fixture
def hub(tmp_path: Path, start: Adapter) -> Any:
    hub = new_hub(tmp_path / "hub", start)
    yield hub
    hub.close()


def six(start: Adapter, attack: Misbehave) -> list[StubSite]:
    return [StubSite(f"site-{n}", start, misbehave=attack if f"site-{n}" == ATTACKER else None) for n in range(1, 7)]


def changed(**fields: Any) -> Misbehave:
    """An honest update with fields of its wire form replaced, not signed again."""
    return lambda site, plan, update: dataclasses.replace(site.sealed(plan, update), **fields)


def signed(ledger_entry: str = "e" * 64, ledger_head: str | None = None, **plan_changes: Any) -> Misbehave:
    """An honest update signed with other accompanying statements."""

    def attack(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        shown = head(site.key) if ledger_head is None else ledger_head
        return seal_bytes(
            update.file_bytes,
            dataclasses.replace(plan, **plan_changes),
            site=site.name,
            key=site.key,
            ledger_entry=ledger_entry,
            ledger_head=shown,
        )

    return attack


def tensors(change: Callable[[np.ndarray], np.ndarray]) -> Misbehave:
    return sends(lambda update: save({name: change(tensor) for name, tensor in update.tensors.items()}))


def bfloat16(update: PrivateUpdate) -> bytes:
    """A safetensors file with bfloat16 values: valid elsewhere, not here."""
    (name,) = update.tensors
    values = update.tensors[name].astype(np.float32).view(np.uint32) >> 16
    return _file({name: {"dtype": "BF16", "shape": list(values.shape)}}, values.astype(np.uint16).tobytes())


def _file(entries: dict[str, dict[str, Any]], data: bytes) -> bytes:
    for entry in entries.values():
        entry.setdefault("data_offsets", [0, len(data)])
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


class _Bomb:
    """Unpickling it would leave a trace."""

    fired = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (setattr, (_Bomb, "fired", True))


def _signed_by_another(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
    thief = new_key()
    shown = head(site.key)
    return seal_bytes(update.file_bytes, plan, site=site.name, key=thief, ledger_entry="e" * 64, ledger_head=shown)


def _sealed_to_another(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
    elsewhere = dataclasses.replace(plan, sealing_key="5" * 64)
    sealed = seal_bytes(
        update.file_bytes, elsewhere, site=site.name, key=site.key, ledger_entry="e" * 64, ledger_head=head(site.key)
    )
    renamed = dataclasses.replace(sealed, plan_digest=plan.digest)
    return dataclasses.replace(renamed, signature=site.key.sign("sealed-update", renamed.signed_payload()))


ATTACKS: dict[str, tuple[Misbehave, str]] = {
    "boosted": (tensors(lambda t: t * 10), "norm 20 exceeds the plan's clip 2"),
    "a little too long": (tensors(lambda t: t * np.float32(1.06)), "exceeds the plan's clip"),
    "infinite": (tensors(lambda t: t * np.float32("inf")), "not finite"),
    "one nan": (
        tensors(lambda t: np.where(np.arange(t.size).reshape(t.shape) == 3, np.float32("nan"), t)),
        "not finite",
    ),
    "float64": (tensors(lambda t: t.astype(np.float64)), "expected float32"),
    "float16": (tensors(lambda t: t.astype(np.float16)), "expected float32"),
    "integers": (tensors(lambda t: np.zeros(t.shape, np.int64)), "expected float32"),
    "bfloat16": (sends(bfloat16), "not a safetensors file"),
    "a pickle": (sends(lambda u: pickle.dumps(_Bomb())), "not a safetensors file"),
    "transposed": (tensors(lambda t: np.ascontiguousarray(t.T)), "has shape"),
    "one value": (tensors(lambda t: t[:1, :1].copy()), "has shape"),
    "scalar": (sends(lambda u: _file({n: {"dtype": "F32", "shape": []} for n in u.tensors}, bytes(4))), "has shape"),
    "an extra tensor": (sends(lambda u: save({**u.tensors, "more": np.zeros(1, np.float32)})), "tensor names differ"),
    "the other factor": (
        sends(lambda u: save({n.replace("lora_B", "lora_A"): t for n, t in u.tensors.items()})),
        "tensor names differ",
    ),
    "no tensors": (sends(lambda u: _file({}, b"")), "tensor names differ"),
    "a header that lies about its size": (sends(lambda u: struct.pack("<Q", 1 << 60) + b"{}"), "not a safetensors"),
    "offsets outside the file": (
        sends(lambda u: _file({"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, b"")),
        "not a safetensors",
    ),
    "zeros of another length": (sends(lambda u: bytes(64)), "not a safetensors"),
    "a gigabyte": (changed(ciphertext=bytes(GIGABYTE)), f"it has {GIGABYTE} bytes, expected at most"),
    "a gigabyte of signature": (changed(signature=bytes(GIGABYTE)), "does not verify"),
    "a gigabyte of site": (changed(site="x" * (GIGABYTE // 4)), "speaks for another site"),
    "a gigabyte of ledger head": (changed(ledger_head="9" * (GIGABYTE // 4)), "not the head of a privacy ledger"),
    "for another site": (changed(site="site-1"), "speaks for another site"),
    "signed by another": (_signed_by_another, "does not verify"),
    "altered on the way": (changed(ciphertext=b"x" * 100), "does not verify"),
    "not signed": (changed(signature=b""), "does not verify"),
    "sealed to another key": (_sealed_to_another, "do not open"),
    "for another round": (signed(round=2, planned_rounds=2), "made for another plan"),
    "on an old adapter": (signed(adapter_version="v9", adapter_digest="9" * 64), "made for another plan"),
    "for another federation": (signed(federation="other"), "made for another plan"),
    "for another clip": (signed(clip_norm=200.0), "made for another plan"),
    "no ledger entry": (signed(ledger_entry="none"), "names no ledger entry"),
    "no ledger head": (signed(ledger_head=""), "not the head of a privacy ledger"),
    "another ledger's head": (
        signed(ledger_head=LedgerHead.signed(9, "d" * 64, new_key()).encode()),
        "does not verify",
    ),
    "not charged, with a ledger": (signed(ledger_entry=NOT_CHARGED), "was not charged and shows a ledger"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_by_name_and_the_round_is_the_others(hub: Hub, start: Adapter, name: str) -> None:
    attack, reason = ATTACKS[name]
    sites = six(start, attack)
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (record,) = run(sites, hub, rule="mean")
    grown_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mb
    (refusal,) = record.refused
    assert (refusal.site, refusal.stage) == (ATTACKER, "validate")
    assert reason in refusal.reason
    assert len(refusal.reason) < 300
    assert record.participants == tuple(site.name for site in sites if site.name != ATTACKER)
    plan = sites[0].plans[0]
    honest = np.mean([site.update(plan).delta_D for site in sites if site.name != ATTACKER], axis=0)
    np.testing.assert_allclose(hub.adapter("v1").flatten(start.names("B")), honest, atol=1e-6)
    assert ATTACKER not in hub.version("v1").lineage.participants
    assert Witness(home_of(hub) / "witness.json").head(sites[2].key.public) == ""
    with log_of(hub) as log:
        assert log.exclusions() == {ATTACKER: {1: refusal}}
        assert ATTACKER not in log.used(plan.digest)
    assert grown_mb < 700 if "gigabyte" in name else grown_mb < 100
    assert not _Bomb.fired


REPLIES: dict[str, tuple[Callable[[], RecordDict], str, str]] = {
    "nothing": (lambda: RecordDict({}), "train", "the reply has no content"),
    "another record": (lambda: RecordDict({"other": ConfigRecord({"a": 1})}), "train", "no content"),
    "arrays": (lambda: RecordDict({"reply": ArrayRecord([np.zeros(3, np.float32)])}), "train", "no content"),
    "an empty reply": (lambda: RecordDict({"reply": ConfigRecord({})}), "validate", "not an update"),
    "not finished, and more": (
        lambda: RecordDict({"reply": ConfigRecord({"unfinished": True, "site": "site-3"})}), "validate", "not an update"
    ),
    "finished is no answer": (
        lambda: RecordDict({"reply": ConfigRecord({"unfinished": 2})}), "validate", "not an update"
    ),
    "an error of another type": (
        lambda: RecordDict({"reply": ConfigRecord({"error": [1, 2], "reason": b"x"})}), "train", "list: bytes"
    ),
    "a gigabyte of excuses": (
        lambda: RecordDict({"reply": ConfigRecord({"error": "x" * (GIGABYTE // 4), "reason": "y"})}), "train", "xxx"
    ),
    "control characters": (
        lambda: RecordDict({"reply": ConfigRecord({"error": "\x1b[2J", "reason": "\x07"})}), "train", "[2J"
    ),
    "a claim to be gone": (
        lambda: RecordDict({"reply": ConfigRecord({"gone": True, "site": "site-3"})}), "validate", "not an update"
    ),
    "fields of other types": (
        lambda: RecordDict(
            {
                "reply": ConfigRecord(
                    {
                        "site": "site-3",
                        "plan_digest": b"x",
                        "ledger_entry": 1,
                        "ledger_head": [1.0],
                        "ciphertext": "text",
                        "signature": True,
                    }
                )
            }
        ),
        "validate",
        "is not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_of_any_form_is_refused_and_the_round_goes_on(
    hub: Hub, start: Adapter, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, stage, reason = REPLIES[name]
    sites = six(start, lambda *_: None)
    real = LocalGrid._answer

    def answer(grid: LocalGrid, message: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1002:
            return Message(make(), reply_to=message)
        return real(grid, message)

    monkeypatch.setattr(LocalGrid, "_answer", answer)
    (record,) = run(sites, hub, timeout_s=10.0)
    (refusal,) = record.refused
    assert (refusal.site, refusal.stage) == (ATTACKER, stage)
    assert reason in refusal.reason
    assert len(refusal.reason) <= 200 and refusal.reason.isprintable()
    assert record.version == "v1"


def test_an_update_that_was_counted_is_not_counted_again_whoever_sends_it(hub: Hub, start: Adapter) -> None:
    """Site 3 sends site 1's own sealed update of the same round, with its name and with its own."""
    stolen: list[SealedUpdate] = []
    for rename in (False, True):

        def copies(site: StubSite, plan: RoundPlan, update: PrivateUpdate, rename: bool = rename) -> SealedUpdate:
            first = sites[0].sealed(plan)  # noqa: B023
            stolen.append(first)
            return dataclasses.replace(first, site=ATTACKER) if rename else first

        sites = six(start, copies)
        (record,) = run(sites, hub, rounds=1 + rename)
        assert [refusal.site for refusal in record.refused] == [ATTACKER]
        expected = "the signature on this" if rename else "speaks for another site"
        assert expected in record.refused[0].reason
        for site in sites:  # the second turn has other keys
            site.plans.clear()
    assert len(stolen) == 2


def test_validation_comes_before_any_arithmetic(start: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature that does not verify is found before a byte is decrypted or parsed."""
    site = StubSite("site-1", start)
    federation = federation_of([StubSite(f"site-{n}", start) for n in range(2, 4)] + [site], rule="mean")
    from tests.common.test_update import SEALING, plan

    current = OpenRound(plan(weights={"site-1": 1}), SEALING, {"a": (1,)})
    sealed = seal_bytes(
        b"x", current.plan, site="site-1", key=new_key(), ledger_entry="e" * 64, ledger_head=head(site.key)
    )
    for name in ("parse_tensors", "check_tensors"):
        monkeypatch.setattr(f"common.update.{name}", lambda *_: pytest.fail("it was parsed"))
    monkeypatch.setattr("common.identity.SealingKey.open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(RoundError, match="does not verify"):
        validate(sealed, current, federation)


def test_a_client_app_without_a_request_answers_with_an_error_class(start: Adapter) -> None:
    site = StubSite("site-1", start)
    grid = LocalGrid(make_client_app(lambda context: site), 1, workers=1)
    try:
        (reply,) = grid.send_and_receive([Message(RecordDict({}), 1000, "train")], timeout=10)
    finally:
        grid.close()
    assert reply.content["reply"]["error"] == "KeyError"
