"""An aggregator that is killed at any moment goes on with the same round; see `killed`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def kill_everywhere(folder: Path, *, rounds: int, every: int) -> int:
    """How often it was killed; it is an error if one restart lost, doubled or half-published anything."""
    command = [sys.executable, "-m", "tests.aggregator.killed", str(folder), str(rounds), str(every)]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["killed"]


def test_a_round_survives_kill_9_at_its_steps(tmp_path: Path) -> None:
    assert kill_everywhere(tmp_path, rounds=1, every=3) >= 20


@pytest.mark.slow
def test_two_rounds_survive_kill_9_before_and_after_every_durable_effect(tmp_path: Path) -> None:
    assert kill_everywhere(tmp_path, rounds=2, every=1) >= 100
