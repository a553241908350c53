"""Rewards, marks and commits: what they change, and that what is refused changes nothing."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PrivacyError, TransportError
from edge_node.collecting.contract import About, RewardGiven, UnknownAnswer
from edge_node.collecting.pending import Pending
from edge_node.collecting.selection import Decision, ExplicitMarking, OnFeedback, SamplingRate, SelectionStrategy
from edge_node.collecting.trajectory_pb2 import Feedback, Trajectory
from edge_node.marking import Mark
from tests.edge_node.collecting.exchanges import NOW, Site, exchange

STRATEGIES = [SamplingRate(1.0), OnFeedback()]
"""What is stored at once, and what waits for feedback."""


def rewards(site: Site) -> dict[str, list[float]]:
    return {r.id: [reward.value for reward in r.rewards if reward.source == "feedback"] for r in site.records()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reward_reaches_all_its_answers_once(tmp_path: Path, strategy: SelectionStrategy) -> None:
    site = Site(tmp_path, strategy)
    for i in range(3):
        site.recorder.record(exchange(f"chatcmpl-{i}", task_id="asked"))
    about = About(["chatcmpl-0", "chatcmpl-2", "chatcmpl-0"], "local", "t1", "r1")
    site.contract.reward(about, 0.75)
    before = rewards(site)
    assert {n: v for n, v in before.items() if v} == {"chatcmpl-0": [0.75], "chatcmpl-2": [0.75]}
    assert {(r.task_id, r.run_id) for r in site.records() if r.id != "chatcmpl-1"} == {("t1", "r1")}
    site.contract.reward(about, 0.75)  # a repetition
    assert rewards(site) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_response_id_means_all_choices_and_a_choice_has_an_id_of_its_own(
    tmp_path: Path, strategy: SelectionStrategy
) -> None:
    site = Site(tmp_path, strategy)
    site.recorder.record(exchange("chatcmpl-1", choices=2))
    site.recorder.record(exchange("chatcmpl-2", choices=2))
    site.contract.reward(About(["chatcmpl-1"], "local"), 1.0)
    site.contract.reward(About(["chatcmpl-2-1"], "local"), 0.5)
    assert rewards(site) == {"chatcmpl-1-0": [1.0], "chatcmpl-1-1": [1.0], "chatcmpl-2-0": [], "chatcmpl-2-1": [0.5]}
    with pytest.raises(RewardGiven):
        site.contract.reward(About(["chatcmpl-2"], "local"), 1.0)
    site.contract.reward(About(["chatcmpl-2-0"], "local"), 1.0)
    assert rewards(site)["chatcmpl-2-0"] == [1.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("names", "key_id"),
    [
        (["chatcmpl-0", "chatcmpl-9"], "k1"),
        (["chatcmpl-0"], "k2"),
        (["chatcmpl-0", "chatcmpl-other"], "k1"),
        (["chatcmpl-0-0"], "k2"),
        ([""], "k1"),
        (["chatcmpl"], "k1"),
        (["chatcmpl-0", "'; DROP TABLE trajectory; --"], "k1"),
    ],
)
def test_unknown_ids_and_another_keys_ids_are_refused_alike_and_nothing_changes(
    tmp_path: Path, strategy: SelectionStrategy, names: list[str], key_id: str
) -> None:
    site = Site(tmp_path, strategy)
    site.recorder.record(exchange("chatcmpl-0", key_id="k1"))
    site.recorder.record(exchange("chatcmpl-other", key_id="k3"))
    site.store.close()
    before, waiting = site.files(), len(site.pending)
    with pytest.raises(UnknownAnswer, match="no answer of this key has the id"):
        site.contract.reward(About(names, key_id), 1.0)
    with pytest.raises(UnknownAnswer):
        site.contract.mark(About(names, key_id), Mark())
    assert site.files() == before
    assert len(site.pending) == waiting
    site.contract.reward(About(["chatcmpl-0"], "k1"), 1.0)
    assert rewards(site)["chatcmpl-0"] == [1.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_reward_for_the_same_answer_is_refused_and_nothing_changes(
    tmp_path: Path, strategy: SelectionStrategy
) -> None:
    site = Site(tmp_path, strategy)
    for i in range(2):
        site.recorder.record(exchange(f"chatcmpl-{i}"))
    site.contract.reward(About(["chatcmpl-1"], "local"), 1.0)
    site.store.close()
    before = site.files()
    with pytest.raises(RewardGiven, match="reward 1 already"):
        site.contract.reward(About(["chatcmpl-0", "chatcmpl-1"], "local"), 0.0)
    assert site.files() == before
    site.contract.reward(About(["chatcmpl-0"], "local"), 0.0)
    assert rewards(site)["chatcmpl-0"] == [0.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_changes_nothing(tmp_path: Path, strategy: SelectionStrategy, reward: float) -> None:
    site = Site(tmp_path, strategy)
    site.recorder.record(exchange())
    with pytest.raises(ValueError, match="finite"):
        site.contract.reward(About(["chatcmpl-1"], "local"), reward)
    site.contract.reward(About(["chatcmpl-1"], "local"), 1.0)
    assert rewards(site) == {"chatcmpl-1": [1.0]}


@pytest.mark.parametrize(("said", "kept"), [(7.0, 5.0), (-9.0, -2.0), (4.5, 4.5), (None, 0.0), (10**30, 5.0)])
def test_rewards_are_clipped_and_an_unnamed_one_is_the_default(tmp_path: Path, said: float | None, kept: float) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange())
    site.contract.reward(About(["chatcmpl-1"], "local"), said)
    assert rewards(site) == {"chatcmpl-1": [kept]}


def test_feedback_about_what_was_not_selected_changes_nothing_and_is_no_error(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(0.0))
    name = site.ids.new("k1")
    site.recorder.record(exchange(name, key_id="k1", choices=2))
    for running in (site, Site(tmp_path, SamplingRate(0.0))):  # also after a restart
        for said in ([name], [f"{name}-1"]):
            running.contract.reward(About(said, "k1"), 1.0)
            running.contract.rate(About(said, "k1"), 1.0)
            running.contract.mark(About(said, "k1"), Mark())
        assert running.files() == {}
        for said, key in (
            ([name], "k2"),
            ([name[:-1] + "x"], "k1"),
            ([f"chatcmpl-{'0' * 40}"], "k1"),
            ([f"{name}0"], "k1"),
        ):
            with pytest.raises(UnknownAnswer):
                running.contract.reward(About(said, key), 1.0)


def test_feedback_that_comes_too_late_changes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, OnFeedback(), pending=Pending(wait_s=60.0))
    name = site.ids.new("local")
    site.recorder.record(exchange(name))
    site.now_s += 61
    site.contract.reward(About([name], "local"), 1.0)
    assert site.files() == {}


def test_marks_afterwards_select_what_waits(tmp_path: Path) -> None:
    site = Site(tmp_path, ExplicitMarking())
    for i in range(2):
        site.recorder.record(exchange(f"chatcmpl-{i}"))
    site.contract.reward(About(["chatcmpl-0"], "local"), 0.5)  # does not select, but is not lost
    assert site.records() == []
    site.contract.mark(About(["chatcmpl-0"], "local", "t1"), Mark(("good",), {"channel": "chat"}))
    (record,) = site.records()
    assert (record.task_id, list(record.selection.labels)) == ("t1", ["good"])
    assert rewards(site) == {"chatcmpl-0": [0.5]}
    site.contract.mark(About(["chatcmpl-0"], "local"), Mark(("other",)))  # decided about already
    assert list(site.records()[0].selection.labels) == ["good"]


def test_task_and_run_are_redacted(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange())
    site.contract.reward(About(["chatcmpl-1"], "local", "for jane@example.org", "password: hunter2"), 1.0)
    assert "jane" not in str(site.records()) and "hunter2" not in str(site.records())
    assert site.contract.commit(key_id="local", task_id="for jane@example.org") == 1


def test_what_the_policy_forbids_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange())
    site.policy.unlink()
    said: list[Callable[[], object]] = [
        lambda: site.contract.reward(About(["chatcmpl-1"], "local"), 1.0),
        lambda: site.contract.mark(About(["chatcmpl-1"], "local"), Mark()),
        lambda: site.contract.commit(key_id="local"),
    ]
    for say in said:
        with pytest.raises(PrivacyError):
            say()
    assert site.contract.commits.count == 0
    assert rewards(site) == {"chatcmpl-1": []}


def test_a_full_disk_loses_nothing_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, OnFeedback())
    site.recorder.record(exchange())

    def full(_: list[Trajectory], **__: object) -> None:
        raise TransportError("trajectories could not be stored: disk full")

    with monkeypatch.context() as broken:
        broken.setattr(site.store, "append", full)
        with pytest.raises(TransportError):
            site.contract.reward(About(["chatcmpl-1"], "local"), 1.0)
    assert site.records() == []
    site.contract.reward(About(["chatcmpl-1"], "local"), 1.0)
    assert rewards(site) == {"chatcmpl-1": [1.0]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_feedback_from_many_threads_counts_once(tmp_path: Path, strategy: SelectionStrategy) -> None:
    site = Site(tmp_path, strategy)
    for i in range(4):
        site.recorder.record(exchange(f"chatcmpl-{i}"))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: site.contract.reward(About([f"chatcmpl-{i % 4}"], "local"), i % 4), range(32)))
    assert rewards(site) == {f"chatcmpl-{i}": [float(i)] for i in range(4)}


# --- ratings


def ratings(site: Site) -> dict[str, tuple[list[float], list[float]]]:
    """What each record says: its ratings, and the rewards that came of them."""
    return {
        r.id: ([f.rating for f in r.feedback], [reward.value for reward in r.rewards if reward.source == "rating"])
        for r in site.records()
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_last_rating_counts_and_leaves_one_trace(tmp_path: Path, strategy: SelectionStrategy) -> None:
    site = Site(tmp_path, strategy)
    site.recorder.record(exchange("chatcmpl-1", choices=2))
    about = About(["chatcmpl-1"], "local", "t1")
    for rating in (1.0, -1.0, -1.0, 1.0, -1.0):
        site.contract.rate(about, rating)
    site.contract.rate(About(["chatcmpl-1-0"], "local"), 0.5)
    assert ratings(site) == {"chatcmpl-1-0": ([0.5], [0.5]), "chatcmpl-1-1": ([-1.0], [-1.0])}
    assert {r.task_id for r in site.records()} == {"t1"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rating_and_a_reward_stand_beside_each_other(tmp_path: Path, strategy: SelectionStrategy) -> None:
    site = Site(tmp_path, strategy)
    site.recorder.record(exchange())
    about = About(["chatcmpl-1"], "local")
    site.contract.rate(about, 1.0)
    site.contract.reward(about, 0.25)
    site.contract.rate(about, -1.0)
    with pytest.raises(RewardGiven):
        site.contract.reward(about, 1.0)
    assert rewards(site) == {"chatcmpl-1": [0.25]}
    assert ratings(site) == {"chatcmpl-1": ([-1.0], [-1.0])}


def test_a_rating_takes_the_place_of_a_rating_and_of_nothing_else_that_was_said(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange())
    site.recorder.add_feedback("chatcmpl-1", Feedback(rating=1.0, text="nice"))
    site.recorder.add_feedback("chatcmpl-1", Feedback(edited_text="nicer"))
    site.now_s += 5
    site.contract.rate(About(["chatcmpl-1"], "local"), -1.0)
    (record,) = site.records()
    assert [(f.rating, f.text, f.edited_text) for f in record.feedback] == [(-1.0, "nice", ""), (0.0, "", "nicer")]
    assert record.feedback[0].received_at_s == NOW + 5
    assert not record.feedback[1].HasField("rating")


def test_a_rating_that_was_noted_without_a_reward_becomes_one(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange())
    site.recorder.add_feedback("chatcmpl-1", Feedback(rating=1.0))
    site.contract.rate(About(["chatcmpl-1"], "local"), 1.0)
    assert ratings(site) == {"chatcmpl-1": ([1.0], [1.0])}


@pytest.mark.parametrize("strategy", [*STRATEGIES, ExplicitMarking()])
def test_a_rating_that_cannot_be_changes_nothing(tmp_path: Path, strategy: SelectionStrategy) -> None:
    site = Site(tmp_path, strategy)
    site.recorder.record(exchange("chatcmpl-1", key_id="k1"))
    site.store.close()
    before, waiting = site.files(), len(site.pending)
    for rating in (1.5, -1.01, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="within -1 and 1"):
            site.contract.rate(About(["chatcmpl-1"], "k1"), rating)
    for about in (About(["chatcmpl-1"], "k2"), About(["chatcmpl-1", "chatcmpl-9"], "k1")):
        with pytest.raises(UnknownAnswer):
            site.contract.rate(about, 1.0)
    assert site.files() == before
    assert len(site.pending) == waiting


def test_a_rating_that_decides_nothing_waits_and_is_kept_when_a_mark_does(tmp_path: Path) -> None:
    site = Site(tmp_path, ExplicitMarking())
    site.recorder.record(exchange())
    about = About(["chatcmpl-1"], "local")
    site.contract.rate(about, 1.0)
    site.contract.rate(about, -1.0)
    assert site.records() == []
    site.contract.mark(about, Mark())
    assert ratings(site) == {"chatcmpl-1": ([-1.0], [-1.0])}


# --- commits


def committed(site: Site) -> dict[str, float]:
    return {r.id: r.committed_at_s for r in site.records()}


def test_a_commit_completes_the_records_it_means_and_no_others(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    for name, asked in (
        ("chatcmpl-0", {"task_id": "t1", "run_id": "r1"}),
        ("chatcmpl-1", {"task_id": "t1", "run_id": "r2"}),
        ("chatcmpl-2", {"task_id": "t2"}),
        ("chatcmpl-3", {"task_id": "t1", "run_id": "r1", "key_id": "k2"}),
    ):
        site.recorder.record(exchange(name, **asked))
    site.now_s += 10
    assert site.contract.commit(key_id="local", task_id="t1", run_id="r1") == 1
    assert site.contract.commit(key_id="local", task_id="t1") == 1
    assert site.contract.commit(key_id="local", task_id="nothing") == 0
    assert committed(site) == {"chatcmpl-0": NOW + 10, "chatcmpl-1": NOW + 10, "chatcmpl-2": 0, "chatcmpl-3": 0}
    site.now_s += 10
    assert site.contract.commit(key_id="local", until_s=NOW - 1) == 0
    assert site.contract.commit(key_id="local") == 1
    assert site.contract.commit(key_id="local") == 0
    assert committed(site)["chatcmpl-0"] == NOW + 10  # the first time counts
    assert committed(site)["chatcmpl-3"] == 0


def test_a_commit_reads_no_record_that_was_committed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    read: list[str] = []
    real = site.store._decrypt
    monkeypatch.setattr(site.store, "_decrypt", lambda *row: read.append(row[0]) or real(*row))
    for i in range(5):
        site.recorder.record(exchange(f"chatcmpl-{i}"))
    assert site.contract.commit(key_id="local") == 5
    assert set(read) == {f"chatcmpl-{i}" for i in range(5)}
    site.now_s += 7200
    site.recorder.record(exchange("chatcmpl-5"))
    site.contract.reward(About(["chatcmpl-1"], "local"), 1.0)  # said late: it stays committed
    read.clear()
    assert site.contract.commit(key_id="local") == 1
    assert set(read) == {"chatcmpl-5"}
    read.clear()
    assert site.contract.commit(key_id="local") == 0
    assert read == []
    assert all(site_record.committed_at_s for site_record in site.records())


def test_hours_from_before_commits_were_noted_are_committed_too(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange("chatcmpl-0"))
    site.recorder.record(exchange("chatcmpl-1", key_id="k2"))
    site.contract.commit(key_id="k2")
    site.store.close()
    (file,) = (tmp_path / "trajectories").glob("*.sqlite")
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("ALTER TABLE trajectory DROP COLUMN committed")
    assert len(site.records()) == 2
    site.contract.reward(About(["chatcmpl-0"], "local"), 1.0)
    site.recorder.record(exchange("chatcmpl-2"))  # the hour goes on
    assert site.contract.commit(key_id="local") == 2
    assert site.contract.commit(key_id="k2") == 0  # its time stays the first
    assert all(committed(site).values())


def test_a_commit_wakes_who_waits_and_none_is_missed(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    commits, woken = site.contract.commits, threading.Semaphore(0)

    def scheduler() -> None:
        seen = 0
        while seen < 3:
            seen = commits.wait(seen, timeout_s=60)
            woken.release()

    threading.Thread(target=scheduler, daemon=True).start()
    for _ in range(3):
        time.sleep(0.05)  # it waits by now
        site.contract.commit(key_id="local")
        assert woken.acquire(timeout=10)
    assert commits.wait(0, timeout_s=0) == 3  # also for one who looks late
    assert commits.wait(3, timeout_s=0.01) == 3


def test_commits_pass_over_damaged_hours(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange("chatcmpl-0"))
    site.now_s += 3600
    site.recorder.record(exchange("chatcmpl-1"))
    site.store.close()
    damaged = min((tmp_path / "trajectories").glob("*.sqlite"))
    damaged.write_bytes(b"not a database" * 1000)
    (tmp_path / "trajectories" / "2026-01-01T05.sqlite").touch()
    assert site.contract.commit(key_id="local") == 1


# --- all of it together


class _Every(SamplingRate):
    """Decides by the answer's number, so that a model can predict it."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.names: list[str] = []

    def decide(self, candidate):  # type: ignore[no-untyped-def]
        number = self.names.index(candidate.exchange.id)
        if number % 3 == 0:
            return Decision(False, "no")
        return Decision(True, "yes") if number % 3 == 1 else OnFeedback().decide(candidate)


@settings(max_examples=25, deadline=None)
@given(
    said=st.lists(
        st.tuples(
            st.lists(st.integers(0, 7), min_size=1, max_size=3),
            st.sampled_from(["k1", "k2"]),
            st.sampled_from([0.0, 1.0]),
        ),
        max_size=12,
    )
)
def test_every_order_of_feedback_keeps_each_first_reward_and_refuses_the_rest(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[list[int], str, float]]
) -> None:
    every = _Every()
    site = Site(tmp_path_factory.mktemp("site"), every)
    names = every.names = [site.ids.new("k1") for _ in range(6)] + [f"chatcmpl-{n}" for n in "67"]
    for name in names[:6]:  # 6 and 7 are never answered
        site.recorder.record(exchange(name, key_id="k1"))
    given_rewards: dict[int, float] = {}
    for numbers, key_id, reward in said:
        about = About([names[n] for n in numbers], key_id)
        refused = key_id == "k2" or any(n > 5 for n in numbers)
        conflict = any(given_rewards.get(n, reward) != reward for n in numbers)
        if refused or conflict:
            with pytest.raises(UnknownAnswer if refused else RewardGiven):
                site.contract.reward(about, reward)
        else:
            site.contract.reward(about, reward)
            given_rewards |= {n: reward for n in numbers if n % 3}
    stored = {1, 4} | {n for n in given_rewards if n % 3 == 2}
    expected = {names[n]: [given_rewards[n]] if n in given_rewards else [] for n in stored}
    assert rewards(site) == expected
    site.store.close()
