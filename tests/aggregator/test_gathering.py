"""The one loop that asks sites, over a grid and with the answers of sealed and of secure rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from aggregator.cohort import Cohort, RoundStatus
from aggregator.combine import OpenRound, requests, settle
from aggregator.flower_sites import FlowerSites
from aggregator.gathering import gather
from aggregator.secure_round import _Asking, _readiness
from aggregator.witness import Witness
from common.adapter import Adapter
from common.errors import PrivacyError, TransportError
from common.plan import verify_plan
from common.update import Refusal, SealedUpdate
from deploy.local_grid import Fault, Faults
from tests.aggregator.stub import StubSite, federation_of, grid_of
from tests.common.test_update import SEALING, plan

KINDS = ("train", "query.secagg")
READY, UNFINISHED, FOR_ANOTHER = "ready", "unfinished", "for another"


@dataclass
class Scripted(StubSite):
    """Answers as told, to either kind of question; `says` is given how often it was asked before."""

    says: Callable[[int], Any] = lambda times: READY
    times: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def _next(self) -> Any:
        with self.lock:
            said, self.times = self.says(self.times), self.times + 1
        if isinstance(said, Exception):
            raise said
        return said

    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]] = ()
    ) -> SealedUpdate | None:
        said = self._next()
        if said == UNFINISHED:
            return None
        update = self.sealed(verify_plan(payload, signature, aggregator=self.aggregator.public))
        return replace(update, site="site-1") if said == FOR_ANOTHER else update

    def secure_answer(
        self, payload: bytes, signature: bytes, witness: str, *, mode: str, request: bytes
    ) -> bytes | None:
        said = self._next()
        return None if said == UNFINISHED else b"words of another" if said == FOR_ANOTHER else b""


@dataclass
class Outcome:
    cohort: Cohort
    kept: list[str]
    told: list[RoundStatus]
    took_s: float

    def refusal(self, site: str) -> Refusal:
        return self.cohort.refused[site]


def gathered(
    kind: str,
    start: Adapter,
    folder: Path,
    says: dict[str, Callable[[int], Any]],
    *,
    faults: Faults = lambda message: None,
    window_s: float = 20.0,
    needed: int = 3,
) -> Outcome:
    """Four sites, asked by the product's loop; those named do as told."""
    sites = [Scripted(f"site-{i}", start, says=says.get(f"site-{i}", lambda times: READY)) for i in range(1, 5)]
    federation = federation_of(sites, rule="mean")
    shapes = {name: start.tensors[name].shape for name in start.names("B")}
    kept: list[str] = []
    current = OpenRound(
        plan(weights=dict.fromkeys(federation.roster, 1)),
        SEALING,
        shapes,
        keep=lambda site, answer: kept.append(site),
    )
    cohort, told, witness = Cohort(1, tuple(federation.roster), needed), [], Witness(folder / "witness.json")
    with grid_of(sites, faults=faults) as grid:
        connected = FlowerSites.connect(grid, federation)
        ask = _Asking(current, connected, federation, witness, needed=needed)
        begun = time.monotonic()
        gather(
            cohort,
            connected,
            kind,
            request=requests(current, federation, witness) if kind == "train" else lambda site: ask.request(site, b""),
            settle=(lambda site, reply: settle(site, reply, current, federation)) if kind == "train" else _readiness,
            window_s=window_s,
            report=told.append,
        )
        took_s = time.monotonic() - begun
    assert not cohort.unsettled
    assert sorted(kept) == sorted(set(kept))
    return Outcome(cohort, kept, told, took_s)


both = pytest.mark.parametrize("kind", KINDS)


@both
def test_all_who_answer_take_part_and_the_round_closes_at_once(kind: str, start: Adapter, tmp_path: Path) -> None:
    outcome = gathered(kind, start, tmp_path, {})
    assert set(outcome.cohort.accepted) == {"site-1", "site-2", "site-3", "site-4"}
    assert outcome.took_s < 10
    assert (outcome.told[-1].awaited, outcome.told[-1].absent) == ((), ())
    assert sorted(outcome.kept) == (sorted(outcome.cohort.accepted) if kind == "train" else [])


@both
def test_who_has_not_finished_is_asked_again_and_named_at_the_deadline(
    kind: str, start: Adapter, tmp_path: Path
) -> None:
    says = {"site-2": lambda times: UNFINISHED if times < 2 else READY, "site-3": lambda times: UNFINISHED}
    outcome = gathered(kind, start, tmp_path, says, window_s=3.0)
    assert set(outcome.cohort.accepted) == {"site-1", "site-2", "site-4"}
    assert outcome.refusal("site-3") == Refusal("site-3", "train", "its update was not finished by the deadline")
    assert outcome.took_s >= 3.0


@both
def test_a_disk_that_fails_in_passing_has_three_tries_and_a_refusal_has_one(
    kind: str, start: Adapter, tmp_path: Path
) -> None:
    asked: dict[str, int] = {}

    def says(site: str, *, failures: int, error: Exception) -> Callable[[int], Any]:
        def said(times: int) -> Any:
            asked[site] = times + 1
            return error if times < failures else READY

        return said

    full = TransportError("x", public="its disk is full")
    outcome = gathered(
        kind,
        start,
        tmp_path,
        {
            "site-1": says("site-1", failures=2, error=full),
            "site-2": says("site-2", failures=9, error=full),
            "site-3": says("site-3", failures=9, error=PrivacyError("x", public="spent")),
        },
        needed=2,
    )
    assert set(outcome.cohort.accepted) == {"site-1", "site-4"}
    assert outcome.refusal("site-2").reason == "TransportError: its disk is full"
    assert outcome.refusal("site-3").reason == "PrivacyError: spent"
    assert asked == {"site-1": 3, "site-2": 3, "site-3": 1}


@both
def test_a_node_that_is_away_is_waited_for_only_while_it_is_needed(kind: str, start: Adapter, tmp_path: Path) -> None:
    def away(message: Message) -> Fault | None:
        gone = message.metadata.dst_node_id == 1001 and message.metadata.message_type == kind
        return Fault.UNREACHABLE if gone else None

    outcome = gathered(kind, start, tmp_path / "three", {}, faults=away)
    assert set(outcome.cohort.accepted) == {"site-1", "site-3", "site-4"} and outcome.took_s < 15
    assert any(status.absent == ("site-2",) for status in outcome.told)
    assert outcome.refusal("site-2").reason.startswith("out of reach")
    assert gathered(kind, start, tmp_path / "four", {}, faults=away, needed=4, window_s=4.0).took_s >= 4.0


@both
def test_a_passing_fault_or_a_reply_that_comes_twice_costs_nothing(kind: str, start: Adapter, tmp_path: Path) -> None:
    left = {1000: Fault.UNREACHABLE, 1001: Fault.NO_REPLY, 1002: Fault.TWICE}

    def faults(message: Message) -> Fault | None:
        return left.pop(message.metadata.dst_node_id, None) if message.metadata.message_type == kind else None

    assert len(gathered(kind, start, tmp_path, {}, faults=faults).cohort.accepted) == 4
    assert not left


@both
def test_a_message_that_is_lost_is_silence_and_what_comes_late_is_not_taken(
    kind: str, start: Adapter, tmp_path: Path
) -> None:
    def slow(times: int) -> str:
        time.sleep(2.5)
        return READY

    def faults(message: Message) -> Fault | None:
        lost = message.metadata.dst_node_id == 1002 and message.metadata.message_type == kind
        return Fault.LOST if lost else None

    outcome = gathered(kind, start, tmp_path, {"site-2": slow}, faults=faults, window_s=1.5, needed=2)
    assert set(outcome.cohort.accepted) == {"site-1", "site-4"}
    assert {outcome.refusal(site).reason for site in ("site-2", "site-3")} == {"no answer within 2 s"}


@both
def test_what_is_for_another_is_refused_by_the_name_of_who_sent_it(kind: str, start: Adapter, tmp_path: Path) -> None:
    outcome = gathered(kind, start, tmp_path, {"site-2": lambda times: FOR_ANOTHER})
    assert set(outcome.cohort.accepted) == {"site-1", "site-3", "site-4"}
    assert outcome.refusal("site-2").stage == "validate"


@both
def test_after_the_deadline_nobody_is_asked(kind: str, start: Adapter, tmp_path: Path) -> None:
    outcome = gathered(kind, start, tmp_path, {}, window_s=0.0)
    assert {refusal.reason for refusal in outcome.cohort.refused.values()} == {"the deadline had passed"}
    assert not outcome.kept
