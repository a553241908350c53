from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from common.errors import TransportError, TrustError
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Feedback, Trajectory

KEY = b"k" * 32
HOUR = 3600.0
START = 1_767_225_600.0  # on the hour


def trajectory(name: str, at_s: float) -> Trajectory:
    made = Trajectory(id=name, request_id=name, collected_at_s=at_s, completion_token_ids=[1, 2, 3])
    made.messages.add(role="user", content=f"the secret question of {name}")
    return made


def names(store: TrajectoryStore, *, after_s: float = 0.0, until_s: float = 4e9) -> list[str]:
    return [t.id for t in store.read(after_s=after_s, until_s=until_s)]


def test_records_come_back_whole_and_in_order_from_one_file_an_hour(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    made = [trajectory(f"r{i}", START + i * HOUR / 2) for i in range(5)]
    for one in made:
        store.append([one])
    assert list(store.read(after_s=0, until_s=4e9)) == made
    assert [f.stem[-2:] for f in sorted((tmp_path / "t").glob("*.sqlite"))] == ["00", "01", "02"]
    assert names(store, after_s=START, until_s=START + HOUR) == ["r1", "r2"]
    store.close()
    assert names(TrajectoryStore(tmp_path / "t", KEY)) == [t.id for t in made]


def test_nothing_is_readable_on_disk(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append([trajectory("r1", START)])
    store.close()
    for file in (tmp_path / "t").iterdir():
        assert b"secret question" not in file.read_bytes()
        assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(TrustError, match="wrong key"):
        names(TrajectoryStore(tmp_path / "t", b"x" * 32))


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE trajectory SET payload = substr(payload, 1, 20)",
        "UPDATE trajectory SET payload = (SELECT payload FROM trajectory WHERE id = 'r2') WHERE id = 'r1'",
        "UPDATE trajectory SET collected_at_s = collected_at_s + 1",
        "UPDATE trajectory SET payload = ''",
    ],
)
def test_an_altered_record_is_noticed(tmp_path: Path, edit: str) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append([trajectory("r1", START), trajectory("r2", START)])
    store.close()
    file = next((tmp_path / "t").glob("*.sqlite"))
    with sqlite3.connect(file) as db:
        db.execute(edit)
    with pytest.raises(TrustError, match="does not decrypt"):
        names(TrajectoryStore(tmp_path / "t", KEY))


def test_a_request_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append([trajectory("r1", START)])
    with pytest.raises(TransportError):
        store.append([trajectory("r2", START), trajectory("r1", START)])
    assert names(store) == ["r1"]
    store.append([trajectory("r3", START)])
    assert names(store) == ["r1", "r3"]


_APPEND_THEN_DIE = """
import os, signal, sys
from pathlib import Path
from tests.edge_node.collecting.test_store import KEY, START, trajectory
from edge_node.collecting.store import TrajectoryStore
store = TrajectoryStore(Path(sys.argv[1]), KEY)
for i in range(50):
    store.append([trajectory(f"r{i}", START)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_nothing_it_stored(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", _APPEND_THEN_DIE, str(tmp_path / "t")], env=os.environ)
    assert died.returncode == -signal.SIGKILL
    assert len(names(TrajectoryStore(tmp_path / "t", KEY))) == 50


_FULL_DISK = """
import resource, sys
from pathlib import Path
from common.errors import TransportError
from tests.edge_node.collecting.test_store import KEY, START, names, trajectory
from edge_node.collecting.store import TrajectoryStore
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = TrajectoryStore(Path(sys.argv[1]), KEY)
store.append([trajectory("r0", START)])
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
stored = 1
try:
    for i in range(1, 5000):
        store.append([trajectory(f"r{i}", START)])
        stored += 1
except TransportError as error:
    print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert names(store) == [f"r{i}" for i in range(stored)], stored
store.append([trajectory("after", START)])
print("whole", stored)
"""


def test_a_full_disk_is_reported_and_loses_nothing_stored_before(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path / "t")], capture_output=True, text=True, env=os.environ
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "refused"
    assert run.stdout.splitlines()[1].startswith("whole")


def test_purging_deletes_whole_hours_only(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    for i in range(4):
        store.append([trajectory(f"r{i}", START + i * HOUR)])
    assert store.purge(before_s=START + 2.5 * HOUR) == 2
    assert names(store) == ["r2", "r3"]


def answers(request: str, count: int, at_s: float) -> list[Trajectory]:
    made = [trajectory(f"{request}-{i}", at_s) for i in range(count)]
    for one in made:
        one.request_id = request
    return made


def rated(store: TrajectoryStore) -> dict[str, list[float]]:
    return {t.id: [event.rating for event in t.feedback] for t in store.read(after_s=0.0, until_s=4e9)}


def content(folder: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every hour, as it lies on the disk."""
    rows = {}
    for file in folder.glob("*.sqlite"):
        with closing(sqlite3.connect(file)) as db:
            rows[file.name] = db.execute("SELECT id, collected_at_s, payload FROM trajectory ORDER BY rowid").fetchall()
    return rows


def test_feedback_reaches_one_answer_or_all_answers_to_a_request(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    for made in ([trajectory("r", START)], answers("q", 2, START), [trajectory("q-x", START + HOUR)]):
        store.append(made)
    assert store.add_feedback("r", Feedback(rating=1.0)) == 1
    assert store.add_feedback("q", Feedback(rating=-1.0)) == 2
    assert store.add_feedback("q-1", Feedback(rating=0.5, edited_text="better")) == 1
    assert rated(store) == {"r": [1.0], "q-0": [-1.0], "q-1": [-1.0, 0.5], "q-x": []}
    assert names(store) == ["r", "q-0", "q-1", "q-x"]
    store.append([trajectory("later", START)])
    store.close()
    assert rated(TrajectoryStore(tmp_path / "t", KEY))["q-1"] == [-1.0, 0.5]


@pytest.mark.parametrize("unknown", ["", "q-", "q-2", "Q", "%", "q%", "'; DROP TABLE trajectory; --", "q\0"])
def test_feedback_on_what_is_not_here_changes_nothing(tmp_path: Path, unknown: str) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append(answers("q", 2, START))
    before = content(tmp_path / "t")
    assert store.add_feedback(unknown, Feedback(rating=1.0)) == 0
    assert content(tmp_path / "t") == before


@pytest.mark.parametrize(
    "feedback",
    [Feedback(rating=float("nan")), Feedback(rating=float("inf")), Feedback(implicit={"dwell_s": float("nan")})],
)
def test_feedback_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path, feedback: Feedback) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append(answers("q", 2, START))
    before = content(tmp_path / "t")
    with pytest.raises(ValueError, match="finite"):
        store.add_feedback("q", feedback)
    assert content(tmp_path / "t") == before


def test_feedback_is_encrypted_like_the_record(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append([trajectory("r", START)])
    before = content(tmp_path / "t")
    store.add_feedback("r", Feedback(text="the secret opinion"))
    store.close()
    [[(_, _, old)], [(_, _, new)]] = [rows for found in (before, content(tmp_path / "t")) for rows in found.values()]
    assert isinstance(old, bytes) and isinstance(new, bytes)
    assert old[:12] != new[:12]  # one nonce, one text
    for file in (tmp_path / "t").iterdir():
        assert b"secret opinion" not in file.read_bytes()
        assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(TrustError, match="wrong key"):
        TrajectoryStore(tmp_path / "t", b"x" * 32).add_feedback("r", Feedback(rating=1.0))


class DiskFillsUp(TrajectoryStore):
    """Fails at the second record it writes."""

    written = 0

    def _encrypt(self, trajectory: Trajectory, collected_at_s: float) -> bytes:
        self.written += 1
        if self.written == 2:
            raise sqlite3.OperationalError("database or disk is full")
        return super()._encrypt(trajectory, collected_at_s)


def test_feedback_on_a_request_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append(answers("q", 3, START))
    before = content(tmp_path / "t")
    with pytest.raises(TransportError, match="could not be changed"):
        DiskFillsUp(tmp_path / "t", KEY).add_feedback("q", Feedback(rating=1.0))
    assert content(tmp_path / "t") == before
    assert store.add_feedback("q", Feedback(rating=1.0)) == 3


_FEEDBACK_THEN_DIE = """
import os, signal, sys
from pathlib import Path
from tests.edge_node.collecting.test_store import KEY
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Feedback
store = TrajectoryStore(Path(sys.argv[1]), KEY)
class Dies(TrajectoryStore):
    def _encrypt(self, trajectory, collected_at_s):
        if trajectory.id == "q-1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._encrypt(trajectory, collected_at_s)
assert store.add_feedback("q", Feedback(rating=1.0)) == 2
Dies(Path(sys.argv[1]), KEY).add_feedback("q", Feedback(rating=2.0))
"""


def test_a_process_killed_while_adding_feedback_leaves_the_records_readable(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append(answers("q", 2, START))
    died = subprocess.run([sys.executable, "-c", _FEEDBACK_THEN_DIE, str(tmp_path / "t")], env=os.environ)
    assert died.returncode == -signal.SIGKILL
    assert rated(store) == {"q-0": [1.0], "q-1": [1.0]}


def test_feedback_from_several_threads_and_stores_is_all_kept(tmp_path: Path) -> None:
    stores = [TrajectoryStore(tmp_path / "t", KEY) for _ in range(2)]
    stores[0].append(answers("q", 2, START))
    with ThreadPoolExecutor(4) as threads:
        counts = threads.map(lambda i: stores[i % 2].add_feedback("q", Feedback(rating=float(i))), range(24))
        stores[0].append([trajectory("r", START)])
    assert list(counts) == [2] * 24
    assert {name: sorted(ratings) for name, ratings in rated(stores[0]).items()} == {
        "q-0": [float(i) for i in range(24)],
        "q-1": [float(i) for i in range(24)],
        "r": [],
    }


def test_feedback_passes_over_damaged_and_purged_hours(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", KEY)
    store.append([trajectory("r", START)])
    store.append([trajectory("s", START + HOUR)])
    store.close()
    damaged, empty = sorted((tmp_path / "t").glob("*.sqlite"))[0], tmp_path / "t" / "2026-01-01T09.sqlite"
    damaged.write_bytes(b"not a database" * 1000)
    empty.touch()
    assert store.add_feedback("s", Feedback(rating=1.0)) == 1
    assert store.add_feedback("r", Feedback(rating=1.0)) == 0
    store.purge(before_s=START + 40 * HOUR)
    assert store.add_feedback("s", Feedback(rating=1.0)) == 0
    assert not list((tmp_path / "t").iterdir())
    assert store._named(empty, ["s"]) == {}  # listed, then purged
    assert not list((tmp_path / "t").iterdir())


def test_who_has_read_up_to_a_time_has_read_all_of_it(tmp_path: Path) -> None:
    """A window that opens while a record is on its way has it, or the next one does."""
    store, seen = TrajectoryStore(tmp_path, b"k" * 32), list[str]()
    reader = threading.Thread(target=lambda: seen.extend(t.id for t in store.read(after_s=0.0, until_s=2.0)))

    def now() -> float:
        reader.start()  # it looks up to a time after this one
        reader.join(0.2)
        return 1.0

    store.append([Trajectory(id="a", collected_at_s=0.5)], now=now)
    reader.join()
    assert seen == ["a"]
    assert [t.collected_at_s for t in store.read(after_s=0.9, until_s=1.0)] == [1.0]


def test_an_hour_that_cannot_be_brought_up_to_date_now_is_said_and_not_passed_over(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path, KEY)
    store.append([trajectory("a", START)])
    store.close()
    (file,) = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("ALTER TABLE trajectory DROP COLUMN committed")  # as hours were before commits were noted
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TransportError, match="cannot be used now"):
            store.edit_uncommitted(lambda _: True, after_s=0.0, until_s=4e9)
        other.execute("ROLLBACK")
    assert store.edit_uncommitted(lambda _: True, after_s=0.0, until_s=4e9) == 1
    store.close()
