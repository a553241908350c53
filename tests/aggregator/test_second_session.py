"""What a secure round does when its session fails: who is asked again, how often, and what is held against whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.cohort import LIED, RoundStatus
from aggregator.witness import Witness
from common.adapter import Adapter
from common.secagg.encoding import decode, encode
from common.secagg.messages import Keys, Reply, Upload, say
from common.update import NOT_CHARGED
from model_hub.hub import Hub
from tests.aggregator import test_secure_round as rounds
from tests.aggregator.stub import head, home_of, new_key
from tests.aggregator.test_secure_round import SecureStub, check_published, secure, sites_of

wide, hub = rounds.wide, rounds.hub


def resigned(site: SecureStub, reply: bytes, message: object) -> bytes:
    said = decode(Reply, reply)
    return encode(Reply(say(message, sender=site.name, transcript=said.signed.transcript, key=site.key), said.words))


def times(site: SecureStub, kind: str) -> int:
    return site.heard.count(kind)


Forged = Callable[[SecureStub, Upload], Upload]


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (lambda site, upload: replace(upload, ledger_head=head(new_key())), "does not verify"),
        (lambda site, upload: replace(upload, ledger_head=""), "not the head of a privacy ledger"),
        (lambda site, upload: replace(upload, ledger_entry=NOT_CHARGED), "it was not charged and shows a ledger"),
    ],
    ids=["another's", "none", "of what was not charged"],
)
def test_an_upload_whose_ledger_does_not_hold_is_left_out_by_name_and_not_remembered(
    forge: Forged, why: str, tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    def change(site: SecureStub, kind: str, reply: bytes) -> bytes:
        if kind != "Admitted":
            return reply
        return resigned(site, reply, forge(site, decode(Upload, decode(Reply, reply).signed.body)))

    sites = sites_of(4, tmp_path, wide)
    sites[2].change = change
    (record,) = secure(sites, hub)
    assert record.participants == ("site-1", "site-2", "site-4")
    check_published(hub, sites, record)
    assert [(r.site, r.stage) for r in record.refused] == [("site-3", "validate")]
    assert record.refused[0].reason.startswith("Upload: ") and why in record.refused[0].reason
    witness = Witness(home_of(hub) / "witness.json")
    assert [bool(witness.head(site.key.public)) for site in sites] == [True, True, False, True]


def failing(kind: str, *, sessions: int) -> Callable[[SecureStub, str, bytes], bytes]:
    """Says nothing that can be read at one step of so many sessions."""
    return lambda site, at, reply: b"garbage" if at == kind and times(site, kind) <= sessions else reply


def test_a_session_that_opened_nothing_is_tried_again_with_all_who_only_failed(
    tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    sites = sites_of(3, tmp_path, wide)
    sites[0].change = failing("Admitted", sessions=1)
    (record,) = secure(sites, hub)
    assert record.participants == ("site-1", "site-2", "site-3") and not record.refused
    check_published(hub, sites, record)
    assert {times(site, "Offer") for site in sites} == {2}


def test_a_third_session_is_not_tried(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(3, tmp_path, wide)
    sites[0].change = failing("Admitted", sessions=2)
    (record,) = secure(sites, hub)
    assert record.version is None and "too few" in record.void_reason
    assert [(r.site, r.stage) for r in record.refused] == [("site-1", "validate")]
    assert {times(site, "Offer") for site in sites} == {2}


def test_a_proven_liar_is_not_in_the_second_session(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    def weak(site: SecureStub, kind: str, reply: bytes) -> bytes:
        return resigned(site, reply, Keys(bytes(32), bytes(32))) if kind == "Offer" else reply

    sites = sites_of(4, tmp_path, wide)
    sites[3].change = weak
    sites[0].change = failing("Offer", sessions=1)  # so that two are left, of three that are needed
    (record,) = secure(sites, hub)
    assert record.participants == ("site-1", "site-2", "site-3")
    check_published(hub, sites, record)
    assert [(r.site, r.stage) for r in record.refused] == [("site-4", LIED)]
    assert [times(site, "Offer") for site in sites] == [2, 2, 2, 1]


def test_a_quarter_of_the_time_is_kept_for_the_session(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    said: list[RoundStatus] = []
    sites = sites_of(3, tmp_path, wide)
    (record,) = secure(sites, hub, timeout_s=40.0, on_status=said.append)
    assert record.version is not None
    assert 20 < said[0].left_s <= 30
