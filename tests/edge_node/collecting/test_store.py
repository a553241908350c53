from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import TransportError, TrustError
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Trajectory

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
