"""Who takes part in a round and when: slow sites, sites that come and go, stale updates, suspensions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import save

from aggregator.cohort import RoundStatus
from aggregator.plan import damping
from aggregator.round_log import Step
from common.adapter import Adapter
from common.errors import ConfigError, TransportError
from common.plan import RoundPlan
from common.update import PrivateUpdate, SealedUpdate
from deploy.local_grid import Fault
from model_hub.evidence import PairedOutcome
from model_hub.hub import Hub
from model_hub.rollout import Stage
from tests.aggregator.stub import Misbehave, StubSite, clock, log_of, new_key, raises, run, sends, six

NAMES = tuple(f"site-{number}" for number in range(1, 7))


def finishes_after(asked: int) -> Misbehave:
    """Not finished the first `asked` times."""
    times = iter(range(asked))

    def misbehave(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate | None:
        return None if next(times, None) is not None else site.sealed(plan, update)

    return misbehave


def never(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> None:
    return None


def test_a_site_that_is_training_is_asked_again(hub: Hub, start: Adapter) -> None:
    sites = six(start, site_2=finishes_after(2))
    (record,) = run(sites, hub)
    assert record.participants == NAMES
    assert len(sites[1].plans) == 3
    assert len({plan.digest for plan in sites[1].plans}) == 1
    assert [len(site.plans) for site in sites if site.name != "site-2"] == [1] * 5


def test_a_site_that_does_not_finish_is_named_at_the_deadline(hub: Hub, start: Adapter) -> None:
    (record,) = run(six(start, site_2=never), hub, timeout_s=1.0)
    assert [(r.site, r.stage, r.reason) for r in record.refused] == [
        ("site-2", "train", "its update was not finished by the deadline")
    ]
    assert len(record.participants) == 5


def test_the_status_says_who_is_awaited(hub: Hub, start: Adapter) -> None:
    told: list[RoundStatus] = []
    run(six(start, site_2=finishes_after(1), site_5=sends(lambda u: b"")), hub, on_status=told.append)
    assert told[0].received == () and set(told[0].awaited) == set(NAMES)
    assert any(status.awaited == ("site-2",) and len(status.received) == 4 for status in told)
    last = told[-1]
    assert (last.awaited, last.absent, last.needed) == ((), (), 4)
    assert [refusal.site for refusal in last.refused] == ["site-5"]
    texts = [str(status) for status in told]
    assert "round 1: 4 updates, 4 needed, 1 refused, waiting for site-2" in texts
    assert 0 < last.left_s <= 20


def test_a_slow_site_does_not_hold_the_others_up(hub: Hub, start: Adapter) -> None:
    arrived: list[tuple[str, ...]] = []
    slow = threading.Event()

    def trains_within_the_message(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        slow.wait(10)
        return site.sealed(plan, update)

    def told(status: RoundStatus) -> None:
        arrived.append(status.received)
        if len(status.received) == 5:
            slow.set()

    (record,) = run(six(start, site_2=trains_within_the_message), hub, on_status=told)
    assert record.participants == NAMES
    assert any(len(received) == 5 and "site-2" not in received for received in arrived)


# --- sites that come and go


def once(fault: Fault, kind: str, node: int) -> Callable[[Message], Fault | None]:
    """A fault for the first message of a kind to a node."""
    left = [fault]

    def faults(message: Message) -> Fault | None:
        if message.metadata.message_type == kind and message.metadata.dst_node_id == 1000 + node and left:
            return left.pop()
        return None

    return faults


@pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.NO_REPLY, Fault.TWICE])
@pytest.mark.parametrize("kind", ["query.identify", "train", "query.golden"])
def test_a_passing_fault_costs_nothing(hub: Hub, start: Adapter, fault: Fault, kind: str) -> None:
    sites = six(start)
    (record,) = run(sites, hub, faults=once(fault, kind, 1), rule="mean")
    assert record.participants == NAMES or (kind == "query.identify" and len(record.participants) == 5)
    assert record.stage is Stage.STABLE
    rows = 6 if record.participants == NAMES else 5
    plan = sites[0].plans[0]
    honest = [site.update(plan).delta_D for site in sites if site.name in record.participants]
    assert len(honest) == rows
    names = start.names("B")
    np.testing.assert_allclose(hub.adapter("v1").flatten(names), np.mean(honest, axis=0), atol=1e-6)
    assert all(len({plan.digest for plan in site.plans}) == 1 for site in sites)


@pytest.mark.parametrize("step", ["query.identify", "train", "query.golden"])
def test_a_site_that_disappears_at_a_step_does_not_stop_the_round(hub: Hub, start: Adapter, step: str) -> None:
    gone: set[int] = set()

    def faults(message: Message) -> Fault | None:
        if message.metadata.dst_node_id == 1001 and message.metadata.message_type == step:
            gone.add(1001)
        return Fault.UNREACHABLE if message.metadata.dst_node_id in gone else None

    (record,) = run(six(start), hub, faults=faults, timeout_s=5.0)
    assert record.stage is Stage.STABLE
    assert ("site-2" in record.participants) is (step == "query.golden")
    expected = {"query.identify": "no node proved", "train": "out of reach", "query.golden": ""}[step]
    assert [r.site for r in record.refused] == (["site-2"] if expected else [])
    assert all(expected in r.reason for r in record.refused)


def test_a_site_whose_disk_fails_in_passing_is_asked_again_and_one_that_stays_broken_is_refused(
    hub: Hub, start: Adapter
) -> None:
    times = iter(range(2))

    def passing(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        if next(times, None) is not None:
            raise TransportError("disk full", public="its disk is full")
        return site.sealed(plan, update)

    sites = six(start, site_2=passing, site_3=raises(TransportError("x", public="its disk is full")))
    (record,) = run(sites, hub)
    assert "site-2" in record.participants
    assert [(r.site, r.reason) for r in record.refused] == [("site-3", "TransportError: its disk is full")]
    assert len(sites[2].plans) == 3


def test_absent_sites_are_waited_for_while_the_quorum_is_missing(hub: Hub, start: Adapter) -> None:
    begun = time.monotonic()

    def away_at_first(message: Message) -> Fault | None:
        late = message.metadata.dst_node_id in (1001, 1002, 1003)
        return Fault.UNREACHABLE if late and time.monotonic() - begun < 1.0 else None

    (record,) = run(six(start), hub, faults=away_at_first)
    assert record.stage is Stage.STABLE
    assert len(record.participants) >= 4


def test_an_answer_after_the_deadline_is_not_taken(hub: Hub, start: Adapter) -> None:
    late = threading.Event()

    def after_the_deadline(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        late.wait(10)
        return site.sealed(plan, update)

    stop = threading.Timer(1.5, late.set)
    stop.start()
    (record,) = run(six(start, site_2=after_the_deadline), hub, timeout_s=1.0)
    assert "site-2" not in record.participants
    with log_of(hub) as log:
        assert "site-2" not in log.used(log.plan(1).digest)


# --- updates for earlier plans


def keeps(updates: dict[str, SealedUpdate], *, given: list[str]) -> Misbehave:
    """Too slow for the plan it is asked about; hands over what it finished for an earlier one, if that is taken."""

    def misbehave(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate | None:
        for digest in site.earlier[-1]:
            if digest in updates:
                given.append(digest)
                return updates[digest]
        updates[plan.digest] = site.sealed(plan, update)
        return None

    return misbehave


def test_a_late_update_counts_in_a_later_round_on_its_factor_damped_and_once(hub: Hub, start: Adapter) -> None:
    updates: dict[str, SealedUpdate] = {}
    given: list[str] = []
    sites = six(start, site_6=keeps(updates, given=given))
    records = run(sites, hub, rounds=3, timeout_s=1.0, rule="mean", lora_mode="alternate")
    assert [("site-6" in record.participants) for record in records] == [False, False, True]
    assert [plan.lora_phase for plan in sites[0].plans] == ["B", "A", "B"]
    first, _, third = (plan for plan in sites[0].plans)
    assert given == [first.digest]
    fresh = [site.update(third).delta_D for site in sites[:5]]
    stale = sites[5].update(first).delta_D * damping(2)  # v0 is two versions behind v2
    moved = hub.adapter("v3").flatten(start.names("B")) - hub.adapter("v2").flatten(start.names("B"))
    np.testing.assert_allclose(moved, np.mean([*fresh, stale], axis=0), atol=1e-6)
    with log_of(hub) as log:
        assert "site-6" in log.used(first.digest) and "site-6" not in log.used(third.digest)


def test_what_a_voided_round_received_is_not_lost_and_not_paid_for_again(hub: Hub, start: Adapter) -> None:
    trained: list[tuple[str, str]] = []

    def reuses(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        for earlier in site.plans:
            if earlier.digest in site.earlier[-1] and (site.name, earlier.digest) in trained:
                return site.sealed(earlier)
        trained.append((site.name, plan.digest))
        return site.sealed(plan, update)

    def broken_at_first(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        if plan.round == 1:
            raise RuntimeError
        return reuses(site, plan, update)

    sites = [StubSite(f"site-{i}", start, misbehave=reuses if i <= 3 else broken_at_first) for i in range(1, 7)]
    first, second = run(sites, hub, rounds=2, rule="mean")
    assert first.void_reason == "3 usable updates of 6 sites, at least 4 are needed"
    assert second.participants == NAMES
    assert [plan.lora_phase for plan in sites[0].plans] == ["B", "B"]  # parity follows the versions, not the rounds
    assert len(trained) == 6 and len({name for name, _ in trained}) == 6
    honest = np.mean([site.update(sites[0].plans[0]).delta_D for site in sites], axis=0)
    np.testing.assert_allclose(hub.adapter("v1").flatten(start.names("B")), honest, atol=1e-6)


REPLAYS: dict[str, tuple[dict[str, int], str]] = {
    "on the other factor": ({"rounds": 2}, "it was made for another plan"),
    "used before": ({"rounds": 3}, "it was counted in an earlier round"),
    "too far behind": ({"rounds": 3, "longest_lag": 1}, "it was made for another plan"),
    "none are taken": ({"rounds": 3, "longest_lag": -1}, "it was made for another plan"),
}


@pytest.mark.parametrize("case", REPLAYS)
def test_an_earlier_update_is_refused_where_it_may_not_count(hub: Hub, start: Adapter, case: str) -> None:
    settings, reason = REPLAYS[case]
    kept: list[SealedUpdate] = []

    def replay(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        kept.append(site.sealed(plan, update))
        return kept[0]

    late = six(start, site_2=replay, site_6=never)  # the sixth keeps the first round open for late updates
    records = run(late, hub, timeout_s=1.0, **settings)  # type: ignore[arg-type]
    assert [("site-2" in record.participants) for record in records] == [True] + [False] * (len(records) - 1)
    refusals = {refusal.site: refusal.reason for refusal in records[-1].refused}
    assert refusals["site-2"] == reason


def test_each_site_is_offered_only_plans_its_update_is_not_used_for(hub: Hub, start: Adapter) -> None:
    sites = six(start, site_6=never)
    run(sites, hub, rounds=3, timeout_s=0.6)
    first = sites[0].plans[0].digest
    assert sites[0].earlier == [[], [], []]
    assert sites[5].earlier[-1] == [first]


def test_keys_of_rounds_that_no_update_can_be_for_any_more_are_erased(hub: Hub, start: Adapter) -> None:
    run(six(start, site_6=never), hub, rounds=4, timeout_s=0.6, longest_lag=2)
    with log_of(hub) as log:
        assert [log.step(number) for number in range(1, 5)] == [Step.CLOSED] * 4
        assert log.keyed_rounds() == [3, 4]  # made on v2 and v3, at most two versions behind v4


# --- sites that were excluded too often


def test_three_exclusions_in_ten_rounds_call_for_a_human(hub: Hub, start: Adapter) -> None:
    bad = sends(lambda u: save({n: t * 10 for n, t in u.tensors.items()}))
    sites = six(start, site_3=bad)
    records = run(sites, hub, rounds=5)
    stages = [[refusal.stage for refusal in record.refused] for record in records]
    assert stages == [["validate"], ["validate"], ["validate"], ["suspended"], ["suspended"]]
    assert len(sites[2].plans) == 3  # it is not even asked
    assert "rounds 1, 2, 3 (norm 20 exceeds" in records[3].refused[0].reason
    assert "an operator has to look" in records[3].refused[0].reason
    assert hub.stable.id == "v5"
    with log_of(hub, owned=False) as log:
        assert list(log.suspended()) == ["site-3"]
        log.readmit("site-3", now_s=clock())
        assert log.suspended() == {}
    sites[2].misbehave = None
    (record,) = run(sites, hub, rounds=6)
    assert "site-3" in record.participants


def test_what_is_not_a_sites_doing_is_not_held_against_it(hub: Hub, start: Adapter) -> None:
    sites = six(start, site_3=raises(RuntimeError()), site_4=never)
    records = run(sites, hub, rounds=4, timeout_s=0.6)
    assert all({r.stage for r in record.refused} == {"train"} for record in records)
    with log_of(hub) as log:
        assert log.exclusions() == {} and log.suspended() == {}


# --- restarts that find another world


def test_a_round_is_voided_where_the_roster_changed_while_it_was_open(hub: Hub, start: Adapter) -> None:
    sites = six(start, site_2=raises(KeyboardInterrupt()))
    for site in sites[:4]:
        site.misbehave = raises(RuntimeError())

    def stop(status: RoundStatus) -> None:
        if status.received:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(sites, hub, on_status=stop, rounds=2)
    replaced = six(start)
    replaced[0].key = new_key()
    first, second = run(replaced, hub, rounds=2)
    assert first.void_reason == "the federation's roster changed while the round was open"
    assert second.stage is Stage.STABLE
    assert hub.stable.lineage.plan_digest == replaced[1].plans[-1].digest


def test_a_round_that_was_interrupted_goes_on_with_what_it_had_received(hub: Hub, start: Adapter) -> None:
    sites = six(start)

    def stop(status: RoundStatus) -> None:
        if len(status.received) >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(sites, hub, on_status=stop, rule="mean")
    with log_of(hub) as log:
        received = set(log.answers(1))
        plan = log.plan(1)
    assert 2 <= len(received) < 6 or received == set(NAMES)
    for site in sites:
        site.plans.clear()
    (record,) = run(sites, hub, rule="mean")
    assert record.participants == NAMES
    for site in sites:
        assert len(site.plans) == (0 if site.name in received else 1)
        assert all(again == plan for again in site.plans)
    honest = np.mean([site.update(plan).delta_D for site in sites], axis=0)
    np.testing.assert_allclose(hub.adapter("v1").flatten(start.names("B")), honest, atol=1e-6)


def test_a_round_whose_deadline_passed_while_the_aggregator_was_away_ends_with_what_it_has(
    hub: Hub, start: Adapter
) -> None:
    sites = six(start)

    def stop(status: RoundStatus) -> None:
        if len(status.received) >= 1:
            raise KeyboardInterrupt

    for site in sites[1:]:
        site.misbehave = never
    with pytest.raises(KeyboardInterrupt):
        run(sites, hub, on_status=stop)
    (record,) = run(sites, hub, clock=lambda: clock() + 1000.0)
    assert record.void_reason == "1 usable updates of 6 sites, at least 4 are needed"
    assert {r.reason for r in record.refused} == {"the deadline had passed"}


def test_two_aggregators_do_not_run_the_same_rounds(hub: Hub, start: Adapter) -> None:
    with log_of(hub), pytest.raises(ConfigError, match="another process runs the rounds"):
        run(six(start), hub)


def test_a_rolled_back_version_does_not_break_the_alternation(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    verdicts = {"v2": (0.1, 0.9)}
    for site in sites:
        site.golden = lambda count, site=site: (
            [  # type: ignore[misc]
                PairedOutcome(False, False, *verdicts.get(site.asked[-1][0], (0.6, 0.5)))
            ]
            * count
        )
    run(sites, hub, rounds=4)
    assert [version.lineage.phase for version in hub.catalog.versions()] == ["", "B", "A", "A", "B"]
