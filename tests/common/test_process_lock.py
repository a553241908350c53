"""One process at a time, also after one that was killed."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.process_lock import ProcessLock

HOLDS = """
import subprocess, sys
from pathlib import Path
from common.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]), refusal="taken")
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""


def locked(path: Path) -> ProcessLock:
    return ProcessLock(path, refusal="somebody has it")


def test_a_second_lock_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "node.lock"
    first = locked(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for _ in range(2):
        with pytest.raises(ConfigError, match="somebody has it"):
            locked(path)
    first.close()
    first.close()
    locked(path).close()


def test_a_killed_process_leaves_no_lock_even_where_a_program_it_started_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "node.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ConfigError, match="somebody has it"):
            locked(path)
        holder.kill()
        holder.wait()
        locked(path).close()
    finally:
        subprocess.run(["kill", f"-{signal.SIGKILL}", str(child)], check=False)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        locked(tmp_path / "gone" / "node.lock")
