"""An aggregator that is killed at any moment goes on with the same round; see `killed` and `killed_secure`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def kill_everywhere(folder: Path, *, rounds: int, every: int) -> int:
    """How often it was killed; it is an error if one restart lost, doubled or half-published anything."""
    return counted("killed", folder, rounds, every)["killed"]


def counted(program: str, *arguments: object) -> dict[str, int]:
    command = [sys.executable, "-m", f"tests.aggregator.{program}", *map(str, arguments)]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_round_survives_kill_9_at_its_steps(tmp_path: Path) -> None:
    assert kill_everywhere(tmp_path, rounds=1, every=3) >= 20


@pytest.mark.slow
def test_two_rounds_survive_kill_9_before_and_after_every_durable_effect(tmp_path: Path) -> None:
    assert kill_everywhere(tmp_path, rounds=2, every=1) >= 100


def test_a_secure_round_is_finished_or_lost_by_kill_9_at_each_of_its_steps(tmp_path: Path) -> None:
    """Lost from the first signature under the choice until the sum is stored: what sites committed, they send once.

    It dies before each effect, which is after the one before: the choice, the last reveal, the witness, the aggregate.
    """
    found = counted("killed_secure", tmp_path, "secagg", 1, 2, "session")
    assert found["killed"] >= 10 and 3 <= found["lost"] < found["killed"] - 5


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("secagg_sketch", 1, 4, "session"), ("secagg", 1, 6)])
def test_secure_rounds_survive_kill_9_in_sketches_and_at_their_durable_effects(
    arguments: tuple[object, ...], tmp_path: Path
) -> None:
    assert counted("killed_secure", tmp_path, *arguments)["killed"] >= 6
