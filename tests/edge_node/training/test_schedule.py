"""When training begins: agents' commits, waiting and deadlines decide it; records never do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PrivacyError, TransportError
from common.plan import RoundPlan
from deploy.world import World
from edge_node.collecting.commits import Commits
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.config import TrainingSettings
from edge_node.node import EdgeNode
from edge_node.training import schedule, site_training
from edge_node.training.background import BackgroundTraining
from edge_node.training.readiness import READINESS
from edge_node.training.schedule import Asked, Held, Schedule, due_at_s
from edge_node.training.trainer import TRAINING
from tests.edge_node.loopback import served
from tests.edge_node.test_hand_over import asked_until
from tests.edge_node.training.test_trainer import plan_of, signed

SEEN_S = 0.4
"""Long enough for a thread that would wrongly begin."""


def held_plan(**fields: Any) -> Held:
    given = {"plan_digest": "d", "payload": b"p", "signature": b"\xff\x00s", "witness": "", "mode": "sealed"}
    return Held(**{**given, "deadline_s": 10_000.0, "arrived_s": 1000.0, **fields})


# --- what decides


@given(
    arrived_s=st.floats(0, 1e9),
    left_s=st.floats(0, 1e6),
    wait_s=st.floats(0, 1e6),
    training_s=st.floats(0, 1e6),
    committed=st.booleans(),
)
def test_a_plan_is_never_later_than_its_wait_or_too_late_for_its_deadline(
    arrived_s: float, left_s: float, wait_s: float, training_s: float, committed: bool
) -> None:
    held = held_plan(arrived_s=arrived_s, deadline_s=arrived_s + left_s)
    due_s = due_at_s(held, committed=committed, wait_s=wait_s, training_s=training_s)
    assert due_s <= arrived_s + wait_s
    if not committed:
        assert due_s + training_s <= arrived_s + left_s
    else:
        assert due_s == -math.inf


def test_waiting_is_the_default_only_where_rounds_take_what_was_committed() -> None:
    assert TrainingSettings().waits_s == 0
    assert TrainingSettings(records="committed").waits_s == 600
    assert TrainingSettings(records="committed", commit_wait_s=0).waits_s == 0
    assert TrainingSettings(commit_wait_s=5).waits_s == 5


class Desk:
    """A schedule whose trainings are only written down."""

    def __init__(self, folder: Path, *, wait_s: float = 100.0, expected_s: float = 0.0) -> None:
        self.now_s, self.begun = 1000.0, list[str]()
        self.commits = Commits(folder / "committed")
        self.schedule = Schedule(
            folder / "held.json",
            self.commits,
            wait_s=wait_s,
            expected_s=lambda _: expected_s,
            begin=lambda held: self.begun.append(held.plan_digest),
            clock=lambda: self.now_s,
        )
        self.schedule.resume()

    def ask(self, plan: RoundPlan) -> bool:
        return self.schedule.may_begin(Asked(plan, plan.payload, b"\xffs", "", "sealed"))


def eventually(holds: Callable[[], Any], *, within_s: float = 120.0) -> None:
    ends = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.02)


def test_a_commit_before_the_plan_counts_once(tmp_path: Path, world: World) -> None:
    desk = Desk(tmp_path)
    desk.commits.announce()
    first, second = plan_of(world, 1), plan_of(world, 2)
    assert desk.ask(first)
    assert desk.ask(first)  # asked again, also after its commit was taken
    assert not desk.ask(second)
    assert Desk(tmp_path).ask(second) is False  # nor after a restart


def test_a_clock_that_goes_back_holds_up_nothing_that_has_begun_or_was_committed(tmp_path: Path, world: World) -> None:
    desk = Desk(tmp_path, wait_s=0.0)
    assert desk.ask(plan_of(world, 1))
    desk.now_s -= 900.0
    assert desk.ask(plan_of(world, 1))
    desk.commits.announce()
    assert desk.ask(plan_of(world, 2))


def test_nothing_begins_after_the_end(tmp_path: Path, world: World) -> None:
    desk = Desk(tmp_path, wait_s=0.0)
    desk.schedule.close()
    assert not desk.ask(plan_of(world))
    background, trained = BackgroundTraining(), list[int]()
    background.close()

    def train() -> Any:
        trained.append(1)

    background.begin("d", train)
    assert background.result("d", train) is None
    time.sleep(SEEN_S)
    assert trained == []


def test_a_plan_that_comes_while_another_begins_is_watched_too(tmp_path: Path, world: World) -> None:
    desk = Desk(tmp_path)
    first, second = plan_of(world, 1), plan_of(world, 2)
    begins = desk.schedule._begin

    def slow(held: Held) -> None:
        begins(held)
        if held.plan_digest == first.digest:
            assert not desk.ask(second)

    desk.schedule._begin = slow
    assert not desk.ask(first)
    desk.commits.announce()
    eventually(lambda: desk.begun == [first.digest])
    desk.commits.announce()
    eventually(lambda: desk.begun == [first.digest, second.digest], within_s=30.0)


def test_a_commit_is_not_forgotten_by_a_restart(tmp_path: Path, world: World) -> None:
    Commits(tmp_path / "committed").announce()
    assert Desk(tmp_path).ask(plan_of(world))


def test_a_later_plan_takes_the_place_of_one_that_waits(tmp_path: Path, world: World) -> None:
    desk = Desk(tmp_path)
    first, second = plan_of(world, 1), plan_of(world, 2)
    assert not desk.ask(first)
    assert not desk.ask(second)
    desk.commits.announce()
    eventually(lambda: desk.begun)
    time.sleep(SEEN_S)
    assert desk.begun == [second.digest]


def test_what_is_left_until_the_deadline_is_kept_for_training(tmp_path: Path, world: World) -> None:
    plan = plan_of(world)
    desk = Desk(tmp_path, wait_s=1e9, expected_s=50.0)
    desk.now_s = plan.deadline_s - 1000
    assert not desk.ask(plan)
    time.sleep(SEEN_S)  # measured by now
    assert desk.begun == []
    desk.now_s = plan.deadline_s - 150  # twice as long as it takes, and a minute
    eventually(lambda: desk.begun == [plan.digest])


def test_a_closed_schedule_begins_nothing(tmp_path: Path, world: World) -> None:
    desk = Desk(tmp_path)
    assert not desk.ask(plan_of(world))
    desk.schedule.close()
    desk.commits.announce()
    time.sleep(SEEN_S)
    assert desk.begun == []
    again = Desk(tmp_path)
    eventually(lambda: again.begun == [plan_of(world).digest])


@pytest.mark.parametrize("held", ["", "{", "[]", json.dumps({"plan_digest": "d"}), "\xff"])
def test_a_damaged_file_holds_nothing(tmp_path: Path, world: World, held: str) -> None:
    (tmp_path / "held.json").write_text(held, encoding="latin-1")
    desk = Desk(tmp_path)
    assert not desk.ask(plan_of(world))
    assert desk.begun == []


def test_a_disk_that_takes_nothing_begins_nothing(tmp_path: Path, world: World) -> None:
    desk = Desk(tmp_path / "gone")
    with pytest.raises(TransportError):
        desk.ask(plan_of(world))
    with pytest.raises(TransportError):
        desk.commits.announce()


def test_a_held_plan_is_the_same_when_it_is_read_again() -> None:
    held = held_plan(payload=bytes(range(256)))
    assert Held.model_validate_json(held.model_dump_json()) == held


# --- on a node


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_LOOK_AGAIN_S", 0.1)  # clocks here are set by hand


@contextmanager
def committing(world: World, **training: Any) -> Iterator[EdgeNode]:
    config = world.setups[0].config
    settings = config.training.model_copy(update={"records": "committed", **training})
    node = EdgeNode(config.model_copy(update={"training": settings}), clock=world.clock)
    try:
        node.look_again()
        yield node
    finally:
        node.close()


def purposes(node: EdgeNode) -> list[str]:
    return [charge.purpose for charge in node.training.ledger.charges()]


def commit(node: EdgeNode) -> None:
    with served(node.app) as url:
        assert httpx2.post(f"{url}/commit", json={}).json() == {"status": "success"}


def test_a_plan_waits_for_a_commit_and_is_trained_once(world: World) -> None:
    plan = plan_of(world)
    with committing(world) as node:
        world.clock.set(world.clock() + 1)
        node.store.append([Trajectory(id="one", request_id="one", key_id="local", collected_at_s=world.clock())])
        for _ in range(3):
            assert node.hand_over(*signed(world, plan), "") is None
        time.sleep(SEEN_S)
        assert purposes(node) == []
        world.clock.set(world.clock() + 1)
        commit(node)
        (record,) = node.store.read(after_s=0, until_s=4e9)
        assert record.committed_at_s == world.clock()
        eventually(lambda: purposes(node) == [TRAINING])  # nobody has asked again
        sealed = asked_until(lambda: node.hand_over(*signed(world, plan), ""))
        assert sealed.plan_digest == plan.digest
        commit(node)
        assert node.hand_over(*signed(world, plan), "") is not None
        assert purposes(node) == [TRAINING]
        assert node.training.updates.data_until_s() == world.clock()  # what was committed is in it


def test_what_is_recorded_or_marked_decides_nothing(world: World) -> None:
    with committing(world) as node:
        names = [f"r{number}" for number in range(20)]
        assert node.hand_over(*signed(world, plan_of(world)), "") is None
        for name in names:
            node.store.append([Trajectory(id=name, request_id=name, committed_at_s=world.clock())], now=world.clock)
        time.sleep(SEEN_S)
        assert node.hand_over(*signed(world, plan_of(world)), "") is None
        assert purposes(node) == []
        assert node.contract.commit(key_id="nobody") == 0  # marks nothing, and is a commit all the same
        eventually(lambda: purposes(node) == [TRAINING])


def test_a_plan_that_has_waited_is_trained_on_what_there_is(world: World) -> None:
    with committing(world, commit_wait_s=30) as node:
        plan = plan_of(world)
        assert node.hand_over(*signed(world, plan), "") is None
        world.clock.set(world.clock() + 29)
        assert node.hand_over(*signed(world, plan), "") is None
        time.sleep(SEEN_S)
        assert purposes(node) == []
        world.clock.set(world.clock() + 2)
        asked_until(lambda: node.hand_over(*signed(world, plan), ""))
        assert purposes(node) == [TRAINING]


def test_a_restart_loses_neither_plan_nor_commit_nor_training(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(world)
    with committing(world) as node:
        assert node.hand_over(*signed(world, plan), "") is None
    with committing(world) as node:  # (1) restarted while it waits
        time.sleep(SEEN_S)
        assert purposes(node) == []
        node._schedule.close()  # (2) killed between the commit and what it wakes
        node.contract.commit(key_id="local")
    real = site_training.train_privately

    def dies(*_: Any, **__: Any) -> Any:
        raise TransportError("killed")

    monkeypatch.setattr(site_training, "train_privately", dies)
    with committing(world) as node:
        eventually(lambda: node._background._error is not None)  # (3) killed while it trains
    monkeypatch.setattr(site_training, "train_privately", real)
    with committing(world) as node:
        eventually(lambda: node.training.updates.get(plan.digest) is not None)  # by itself, with nobody asking
        assert asked_until(lambda: node.hand_over(*signed(world, plan), "")).plan_digest == plan.digest
        assert purposes(node) == [TRAINING]
    with committing(world) as node:  # (4) finished: not trained again
        time.sleep(SEEN_S)
        assert node.hand_over(*signed(world, plan), "") is not None
        assert purposes(node) == [TRAINING]


def test_a_law_that_was_changed_meanwhile_holds_for_what_waits(world: World) -> None:
    policy = world.setups[0].config.policy
    with committing(world) as node:
        plan = plan_of(world)
        assert node.hand_over(*signed(world, plan), "") is None
        policy.write_text(policy.read_text().replace("updates = true", "updates = false"))
        node.contract.commit(key_id="local")
        eventually(lambda: node._schedule._watching is None)  # it was due, and refused
        assert not node._background.is_busy
        assert purposes(node) == []
        with pytest.raises(PrivacyError, match="does not allow uploading"):
            node.hand_over(*signed(world, plan), "")
        assert purposes(node) == []


def test_a_plan_on_disk_that_the_aggregator_did_not_sign_is_not_trained(world: World) -> None:
    plan = plan_of(world)
    with committing(world) as node:
        assert node.hand_over(*signed(world, plan), "") is None
    file = world.setups[0].config.data_dir / "held-plan.json"
    held = Held.model_validate_json(file.read_bytes())
    file.write_text(held.model_copy(update={"signature": b"x" * 64, "begun": True}).model_dump_json())
    with committing(world) as node:
        time.sleep(SEEN_S)
        assert purposes(node) == []
        assert not node._background.is_busy
        assert asked_until(lambda: node.hand_over(*signed(world, plan), "")).plan_digest == plan.digest


def test_too_little_data_is_charged_once_a_plan_however_often_it_is_woken(world: World) -> None:
    plan = plan_of(world)
    with committing(world, min_samples=1_000_000) as node:
        assert node.hand_over(*signed(world, plan), "") is None
        for _ in range(3):
            node.contract.commit(key_id="local")
        for _ in range(2):
            with pytest.raises(PrivacyError, match="fewer than min_samples"):
                asked_until(lambda: node.hand_over(*signed(world, plan), ""))
            node.contract.commit(key_id="local")
            time.sleep(SEEN_S)
        assert purposes(node) == [READINESS]
    with committing(world, min_samples=1_000_000) as node:
        time.sleep(SEEN_S)
        assert purposes(node) == [READINESS]
        with pytest.raises(PrivacyError, match="fewer than min_samples"):
            asked_until(lambda: node.hand_over(*signed(world, plan), ""))
        assert purposes(node) == [READINESS]
