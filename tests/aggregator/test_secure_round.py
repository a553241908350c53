"""Whole rounds in the secure modes over the in-process grid: sites with real records on disk, killed anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from aggregator.cohort import EXCLUDING_STAGES, RoundStatus
from aggregator.round_log import RoundRecord
from aggregator.secure_round import SILENCE, _Asking, _refusals
from aggregator.witness import Witness
from common.adapter import Adapter, LoraShape, initial_adapter
from common.errors import ConfigError, RoundError, TrustError
from common.plan import RoundPlan, verify_plan
from common.secagg import SKETCH, SUM_ONLY, Limits, UpdateRecord, UpdateState
from common.secagg.encoding import decode, encode
from common.secagg.messages import Reply, Signed, SketchReport, say
from common.secagg.states import array_sha256
from common.update import PrivateUpdate, Refusal
from deploy.local_grid import Fault
from edge_node.policy import SitePolicy
from edge_node.secure_session import SecureSessions, UpdateRecords, is_ready, offered_terms
from model_hub.hub import Hub
from tests.aggregator.stub import AGGREGATOR, StubSite, federation_of, head, home_of, log_of, new_hub, run

STEPS = ("Offer", "Roll", "Deal", "Admitted", "Uploads", "Agreed", "Choice", "Agreed again")


@dataclass
class SecureStub(StubSite):
    """A stub whose secure sessions are the product's, on this folder."""

    folder: Path = Path()
    modes: tuple[str, ...] = (SUM_ONLY, SKETCH)
    word_bits: int = 32
    directions: int = 0
    roster: dict[str, bytes] = field(default_factory=dict)
    change: Callable[[SecureStub, str, bytes], Any] = lambda site, kind, reply: reply
    restart_at: str = ""
    heard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """As a new process of this site: what it said is on its disk, its session keys are gone."""
        self.sessions = SecureSessions(self.folder, name=self.name, key=self.key, server=AGGREGATOR.public)

    def law(self) -> SitePolicy:
        sites = [{"name": n, "key": k.hex(), "organisation": n} for n, k in self.roster.items()]
        return SitePolicy.model_validate(
            {
                "privacy": {"unit": "trajectory", "epsilon_total": 8.0, "delta": 1e-5},
                "upload": {"updates": True, "aggregation": self.modes, "word_bits": self.word_bits},
                "choosing": {"directions": self.directions},
                "roster": sites,
            }
        )

    def secure_answer(
        self, payload: bytes, signature: bytes, witness: str, *, mode: str, request: bytes
    ) -> bytes | None:
        plan = verify_plan(payload, signature, aggregator=AGGREGATOR.public)
        ready = is_ready(request)
        kind = "ready" if ready else decode(Signed, request).kind
        kind = "Agreed again" if kind == "Agreed" and "Choice" in self.heard else kind
        self.heard.append(kind)
        if kind == self.restart_at:
            self.restart_at = ""
            self.restart()
        if self.sessions.is_live(plan, mode, request):
            reply = self.sessions.step(request)
        else:
            update = self.update(plan)
            self.sessions.check(
                plan,
                self.law(),
                mode=mode,
                dimension=len(update.delta_D),
                offered=offered_terms(request) if ready else None,
            )
            reply = (
                b""
                if ready
                else self.sessions.begin(
                    request, plan, self.law(), mode=mode, update=update, ledger_head=head(self.key)
                )
            )
        return self.change(self, kind, reply)

    def state(self, number: int = 1) -> str:
        record = UpdateRecords(self.folder).get("test", number)
        return str(record.state) if record else "absent"


@pytest.fixture(scope="module")
def wide() -> Adapter:
    """Large enough to be sketched: 10 240 parameters in each factor."""
    shapes = {f"model.layers.{layer}.self_attn.q_proj": (640, 640) for layer in range(2)}
    return initial_adapter(shapes, LoraShape(8, 8.0, ("q_proj",)), seed=0)


@pytest.fixture
def hub(tmp_path: Path, wide: Adapter) -> Iterator[Hub]:
    hub = new_hub(tmp_path / "hub", wide)
    yield hub
    hub.close()


def sites_of(n: int, folder: Path, adapter: Adapter, **options: Any) -> list[SecureStub]:
    sites = [SecureStub(f"site-{i}", adapter, folder=folder / f"s{i}", **options) for i in range(1, n + 1)]
    for site in sites:
        site.roster = {other.name: other.key.public for other in sites}
    return sites


def secure(sites: list[SecureStub], hub: Hub, mode: str = SUM_ONLY, **settings: Any) -> list[RoundRecord]:
    return run(list(sites), hub, aggregation=mode, rule="mean", **{"timeout_s": 30.0, **settings})


def check_published(hub: Hub, sites: list[SecureStub], record: RoundRecord, *, error: float = 1e-6) -> None:
    """The version is the old one plus the mean of the participants' updates, to `error` in each coordinate."""
    assert record.version is not None, record.void_reason
    with log_of(hub) as log:
        plan = log.plan(record.number)
    before, after = hub.adapter(plan.adapter_version), hub.adapter(record.version)
    mean = np.mean(
        [site.update(plan).delta_D.astype(np.float64) for site in sites if site.name in record.participants], axis=0
    )
    moved = np.concatenate([(after.tensors[n] - before.tensors[n]).reshape(-1) for n in before.names(plan.lora_phase)])
    assert np.abs(moved - mean).max() < error


@pytest.mark.parametrize(("n", "mode"), [(3, SUM_ONLY), (5, SKETCH)])
def test_a_round_publishes_the_mean_and_the_aggregator_remembers_the_ledgers(
    n: int, mode: str, tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    sites = sites_of(n, tmp_path, wide)
    (record,) = secure(sites, hub, mode)
    check_published(hub, sites, record)
    assert {site.state() for site in sites} == {"committed"}
    assert len(record.participants) + sum(r.stage == "select" for r in record.refused) == n
    witness = Witness(home_of(hub) / "witness.json")
    assert all(witness.head(site.key.public) == head(site.key) for site in sites if site.name in record.participants)
    with log_of(hub) as log:
        assert log.choices() == {1: frozenset(record.participants)}
    assert not list(tmp_path.glob("s*/**/*.words"))


def test_the_status_says_which_step_waits_for_whom(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    told: list[RoundStatus] = []
    sites = sites_of(4, tmp_path, wide)
    secure(sites, hub, SKETCH, on_status=told.append)
    steps = list(dict.fromkeys(status.step for status in told))
    expected = ["keys", "dealings", "verdicts", "uploads", "agreements", "sketches", "commitments", "reveals"]
    assert steps == ["", *expected]
    first = next(status for status in told if status.step == "uploads")
    assert set(first.awaited) == {site.name for site in sites} and first.needed == 3 and not first.received
    assert str(replace(first, received=(), awaited=("site-2",))) == (
        "round 1, uploads: 0 answers, 3 needed, waiting for site-2"
    )


def test_words_of_sixteen_bits_publish_the_mean_to_the_error_that_is_stated(
    tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    sites = sites_of(5, tmp_path, wide, word_bits=16)
    sites[1].restart_at = "Uploads"  # and one that comes back has sent the same words
    sizes: set[int] = set()

    def weighed(site: SecureStub, kind: str, reply: bytes) -> bytes:
        if kind == "Admitted":
            sizes.add(len(decode(Reply, reply).words))
        return reply

    for site in sites:
        site.change = weighed
    for record in secure(sites, hub, word_bits=16, rounds=2):
        one = 1.3e-4 * 5 * 2.0  # root of the mean square of one site's rounding, W = 5 and C = 2: in the mean, by √5
        check_published(hub, sites, record, error=6 * one / np.sqrt(5) / np.sqrt(10_240))
    assert sizes == {2 * 10_240}


def test_sites_that_say_another_width_take_no_part(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(5, tmp_path, wide, word_bits=16)
    sites[0].word_bits = 32
    (record,) = secure(sites, hub, word_bits=16)
    assert record.participants == ("site-2", "site-3", "site-4", "site-5")
    assert any(r.site == "site-1" and "word_bits" in r.reason for r in record.refused), record.refused
    with pytest.raises(ConfigError, match="carry mode secagg only"):
        federation_of(sites, rule="mean", aggregation=SKETCH, word_bits=16)
    with pytest.raises(ConfigError, match="carry mode secagg only, not sealed"):
        federation_of(sites, rule="mean", word_bits=16)


def test_several_rounds_with_the_same_sites(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(4, tmp_path, wide)
    records = secure(sites, hub, rounds=3)
    for record in records:
        assert len(record.participants) == 4


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=pytest.mark.slow if step in ("Roll", "Deal") else ()) for step in STEPS]
)
def test_a_site_that_is_killed_and_comes_back_before_any_step(
    step: str, tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    sites = sites_of(5, tmp_path, wide)
    sites[1].restart_at = step
    (record,) = secure(sites, hub, SKETCH)
    assert sites[1].restart_at == "", "it was restarted"
    late = STEPS.index(step) >= STEPS.index("Agreed")
    if record.version is not None:
        check_published(hub, sites, record)
    else:
        assert late and record.void_reason
    kept = UpdateRecords(sites[1].folder).get("test", 1)
    assert kept is None or kept.uploads <= 2


class Killed(BaseException):
    """The aggregator's process ends here."""


@pytest.mark.parametrize(
    ("mode", "step"),
    [*((SUM_ONLY, step) for step in STEPS[:-1]), *(pytest.param(SKETCH, s, marks=pytest.mark.slow) for s in STEPS)],
)
def test_an_aggregator_killed_before_any_step_finishes_the_round_or_voids_it(
    step: str, mode: str, tmp_path: Path, hub: Hub, wide: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = sites_of(4, tmp_path, wide)
    ask, asked, killed = _Asking.__call__, [], []

    def dies(self: _Asking, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        kind = decode(Signed, next(iter(requests.values()))).kind
        kind = "Agreed again" if kind == "Agreed" and "Agreed" in asked else kind
        asked.append(kind)
        if kind == step and not killed:
            killed.append(kind)
            raise Killed
        return ask(self, requests)

    monkeypatch.setattr(_Asking, "__call__", dies)
    with pytest.raises(Killed):
        secure(sites, hub, mode, rounds=2)
    assert killed
    states = {site.state() for site in sites}
    (record,) = secure(sites, hub, mode, rounds=2, at_most=1)
    assert record.number == 1
    if record.version is not None:
        check_published(hub, sites, record)
        assert states <= {"absent", "new", "uploaded"}
    else:  # sketches were open, or the choice was signed: these updates are spent
        assert hub.stable.id == "v0" and hub.canary is None
    assert (record.version is None) == bool(states & {"opened", "committed"})
    following = secure(sites, hub, mode, rounds=2)
    assert [r.number for r in following] == [2] and following[0].version is not None, following


@dataclass
class Liar(SecureStub):
    """Sends the negative of what it learned."""

    def update(self, plan: RoundPlan) -> PrivateUpdate:
        update = super().update(plan)
        return replace(update, delta_D=-update.delta_D)


def test_a_site_that_public_data_contradict_is_left_out_and_asked_for_nothing_until_the_window_ends(
    tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    """Not asked, it trains nothing and pays nothing for rounds that nobody would sum it in."""
    sites = sites_of(6, tmp_path, wide, directions=1)
    sites[5] = Liar("site-6", wide, key=sites[5].key, folder=sites[5].folder, directions=1, roster=sites[5].roster)
    sites[5].sessions = SecureSessions(sites[5].folder, name="site-6", key=sites[5].key, server=AGGREGATOR.public)
    seen: list[int] = []

    def reference(plan: RoundPlan) -> np.ndarray:
        seen.append(plan.round)
        return StubSite.update(sites[0], plan).delta_D

    records = secure(sites, hub, SKETCH, rounds=2, limits=Limits(directions=1), reference=reference)
    assert seen == [1, 2]
    for record in records:
        assert record.participants == tuple(f"site-{i}" for i in range(1, 6))
        check_published(hub, sites, record, error=1e-5)
        assert hub.version(str(record.version)).lineage.rule == f"{SKETCH}+reference"
    assert [[(r.site, r.stage) for r in record.refused] for record in records] == [
        [("site-6", "select")],
        [("site-6", "suspended")],
    ]
    assert "what public data teach" in records[0].refused[0].reason
    assert "up to round 10" in records[1].refused[0].reason
    heard = list(sites[5].heard)
    assert heard.count("Offer") == 1 and sites[5].state(2) == "absent"
    assert sites[0].state(2) == "committed"


@pytest.mark.parametrize(("count", "mode", "directions"), [(6, SUM_ONLY, 1), (6, SKETCH, 0), (4, SKETCH, 1)])
def test_nobody_trains_a_reference_that_could_leave_nobody_out(
    count: int, mode: str, directions: int, tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    def never(plan: RoundPlan) -> np.ndarray:
        raise AssertionError("asked in vain")

    sites = sites_of(count, tmp_path, wide, directions=directions)
    if count == 4:
        sites[3].change = lambda site, kind, reply: None if kind == "ready" else reply
    limits = Limits(directions=directions)
    (record,) = secure(sites, hub, mode, limits=limits, reference=never, timeout_s=30.0 if count > 4 else 6.0)
    if record.version is not None:
        assert hub.version(record.version).lineage.rule == mode


def test_sites_whose_policies_say_otherwise_take_no_part_in_a_round_with_a_direction(
    tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    sites = sites_of(6, tmp_path, wide, directions=1)
    sites[0].directions = 0
    (record,) = secure(sites, hub, SKETCH, limits=Limits(directions=1))
    assert record.participants == tuple(f"site-{i}" for i in range(2, 7))
    assert any(r.site == "site-1" and "limits" in r.reason for r in record.refused), record.refused


def test_a_site_whose_policy_names_other_modes_takes_no_part(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(4, tmp_path, wide)
    sites[3].roster = {**sites[3].roster, "site-9": sites[0].key.public}  # it approved another roster
    (record,) = secure(sites, hub)
    assert record.participants == ("site-1", "site-2", "site-3")
    assert any("another roster" in refusal.reason for refusal in record.refused)
    check_published(hub, sites, record)


def test_a_proven_lie_voids_the_round_and_bans_the_liar_until_a_person_has_looked(
    tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    def lie(site: SecureStub, kind: str, reply: bytes) -> bytes:
        if kind != "Agreed":
            return reply
        said = decode(Reply, reply).signed
        report = decode(SketchReport, said.body)
        false = replace(report, own=bytes([report.own[0] ^ 1]) + report.own[1:])
        return encode(Reply(say(false, sender=site.name, transcript=said.transcript, key=site.key), b""))

    sites = sites_of(6, tmp_path, wide)
    sites[2].change = lie
    records = secure(sites, hub, SKETCH, rounds=2)
    assert records[0].version is None
    assert [refusal.site for refusal in records[0].refused if refusal.stage == "lied"] == ["site-3"]
    assert any("it lied" in refusal.reason for refusal in records[1].refused if refusal.site == "site-3")
    assert records[1].participants and "site-3" not in records[1].participants


@pytest.mark.parametrize(
    "answer", [b"garbage", b"", "text", 7, [1, 2]], ids=["bytes", "nothing", "text", "number", "list"]
)
def test_replies_that_are_none_put_their_site_out(answer: Any, tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(4, tmp_path, wide)
    sites[0].change = lambda site, kind, reply: answer if kind == "Admitted" else reply
    (record,) = secure(sites, hub)
    assert record.participants == ("site-2", "site-3", "site-4")
    check_published(hub, sites, record)


def test_a_site_that_is_late_or_fails_before_the_session_is_named(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(5, tmp_path, wide)

    def fails(site: SecureStub, kind: str, reply: bytes) -> bytes:
        raise RoundError("no", public="not today")

    sites[0].change = fails
    sites[1].change = lambda site, kind, reply: None if kind == "ready" else reply
    (record,) = secure(sites, hub, timeout_s=6.0)
    assert record.version is None or record.participants == ("site-3", "site-4", "site-5")
    reasons = {refusal.site: refusal.reason for refusal in record.refused}
    assert "not today" in reasons["site-1"] and "not finished by the deadline" in reasons["site-2"]


def test_messages_lost_on_the_way_are_a_dropout(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(5, tmp_path, wide)
    lost: list[int] = []

    def faults(message: Message) -> Any:
        if message.metadata.message_type != "query.secagg" or lost:
            return None
        request = message.content["request"]["request"]
        if not is_ready(request) and decode(Signed, request).kind == "Roll":
            lost.append(1)
            return next(iter(Fault))
        return None

    (record,) = run(
        list(sites), hub, aggregation=SUM_ONLY, rule="mean", timeout_s=30.0, step_timeout_s=3.0, faults=faults
    )
    assert lost
    if record.version is not None:
        check_published(hub, sites, record)


def test_too_few_sites_are_refused_when_the_federation_is_made(tmp_path: Path, wide: Adapter) -> None:
    with pytest.raises(ConfigError, match="secagg_sketch needs at least 4 sites, got 3"):
        federation_of(sites_of(3, tmp_path, wide), rule="mean", aggregation=SKETCH)
    with pytest.raises(ConfigError, match="unknown aggregation 'clear'"):
        federation_of(sites_of(3, tmp_path, wide), rule="mean", aggregation="clear")


# --- the site's disk


def test_damaged_records_stop_the_round_and_not_the_site(tmp_path: Path, hub: Hub, wide: Adapter) -> None:
    sites = sites_of(4, tmp_path, wide)
    secure(sites, hub, rounds=2, at_most=1)
    (file,) = (tmp_path / "s1").glob("*/1.json")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(TrustError, match="cannot be read"):
        UpdateRecords(sites[0].folder).get("test", 1)
    records = secure(sites, hub, rounds=2)
    assert records[-1].participants == ("site-2", "site-3", "site-4")
    file.write_text('{"federation":"other","round":1,"planned_rounds":3,"plan_digest":"","update_sha256":""}')
    with pytest.raises(TrustError, match="another round's record"):
        UpdateRecords(sites[0].folder).get("test", 1)


def test_a_damaged_record_of_an_earlier_round_is_named_before_anyone_counts_on_its_site(
    tmp_path: Path, hub: Hub, wide: Adapter
) -> None:
    """What it counted bounds the next round: that round goes on without the site, and the site's people are told."""
    sites = sites_of(4, tmp_path, wide)
    secure(sites, hub, rounds=2, at_most=1)
    (file,) = (tmp_path / "s1").glob("*/1.json")
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(TrustError, match=f"{file} cannot be read; .* restore this one file .* do not remove it"):
        UpdateRecords(sites[0].folder).others("test", 2)
    (record,) = secure(sites, hub, rounds=2)
    assert record.participants == ("site-2", "site-3", "site-4")
    assert [r.reason for r in record.refused if r.site == "site-1"] == ["TrustError: a record is damaged"]
    assert sites[0].heard[-1] == "ready"  # it was in no session of the second round
    file.write_bytes(whole)
    assert UpdateRecords(sites[0].folder).others("test", 2)[0].round == 1


def test_words_that_no_round_can_ask_for_do_not_pile_up_and_records_stay(tmp_path: Path) -> None:
    records, words = UpdateRecords(tmp_path), np.arange(6, dtype=np.uint32)

    def sent(number: int) -> UpdateRecord:
        fresh = UpdateRecord("f", number, 9, "0" * 64, "1" * 64)
        return replace(
            fresh, state=UpdateState.UPLOADED, uploads=1, sessions=("a" * 64,), words_sha256=array_sha256(words)
        )

    for number in (1, 2, 5):
        records.keep(sent(number), words)
    records.keep(sent(3), words)  # an earlier round that is taken up again forgets nothing later
    assert sorted(int(file.stem) for file in tmp_path.glob("*/*.words")) == [3, 5]
    assert [record.round for record in records.others("f", 9)] == [1, 2, 3, 5]
    with pytest.raises(TrustError, match="not what was sent before"):
        records.words(sent(1), np.dtype(np.uint32))
    np.testing.assert_array_equal(records.words(sent(5), np.dtype(np.uint32)), words)


def test_stored_words_that_were_changed_are_not_sent(
    tmp_path: Path, hub: Hub, wide: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = sites_of(4, tmp_path, wide)
    ask = _Asking.__call__

    def dies(self: _Asking, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        if decode(Signed, next(iter(requests.values()))).kind == "Uploads":
            raise Killed
        return ask(self, requests)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(_Asking, "__call__", dies)
        secure(sites, hub)
    (file,) = (tmp_path / "s1").glob("*/1.words")
    changed = bytearray(file.read_bytes())
    changed[0] ^= 1
    file.write_bytes(bytes(changed))
    (record,) = secure(sites, hub)
    assert record.participants == ("site-2", "site-3", "site-4")
    assert any(refusal.site == "site-1" and "damaged" in refusal.reason for refusal in record.refused)


def test_what_could_not_be_used_is_held_against_its_site_and_silence_is_not() -> None:
    session = SimpleNamespace(
        refusals=[
            Refusal("site-1", "Upload", "the masked words are not those it signed"),
            Refusal("site-2", "Upload", SILENCE),
            Refusal("site-3", "select", "it stands apart from the others"),
            Refusal("site-4", "complaints", "1 sites cannot open the share it dealt them"),
        ],
        guilty={"site-5": "it lied"},
    )
    found = {refusal.site: refusal for refusal in _refusals(session, {"site-2": "the policy says no"})}  # type: ignore[arg-type]
    held = {site for site, refusal in found.items() if refusal.stage in EXCLUDING_STAGES}
    assert held == {"site-1", "site-3", "site-5"}
    assert found["site-1"].reason == "Upload: the masked words are not those it signed"
    assert found["site-2"].reason == "the policy says no"


def test_what_a_site_said_is_on_its_disk_with_the_folders_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronised: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synchronised.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    records = UpdateRecords(tmp_path / "data" / "secure")
    records.keep(UpdateRecord("f", 1, 3, "0" * 64, "1" * 64), None)
    assert {str(tmp_path), str(tmp_path / "data"), str(tmp_path / "data" / "secure")} <= set(synchronised)
    assert all((tmp_path / part).stat().st_mode & 0o077 == 0 for part in ("data", "data/secure"))
