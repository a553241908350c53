"""Kill -9 before and after each durable effect of a round, then start again; run as a program by `test_killed`.

    python -m tests.aggregator.killed FOLDER ROUNDS EVERY

Each attempt is a forked child with files of its own. A durable effect is a commit of either database, a rename, a
link or an fsync. What must hold afterwards is in `check`; the program ends with the first attempt where it does not.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.round_log import RoundLog, Step
from common.adapter import LoraShape, initial_adapter
from common.plan import RoundPlan
from common.update import PrivateUpdate, SealedUpdate
from model_hub.evidence import Thresholds
from model_hub.hub import Hub
from model_hub.rollout import Stage
from tests.aggregator.stub import BASE, StubSite, clock, new_key, run

START = initial_adapter({"model.layers.0.self_attn.q_proj": (6, 5)}, LoraShape(2, 4.0, ("q_proj",)), seed=0)
HUB_KEY = new_key()
SITES = [StubSite(f"site-{number}", START) for number in (1, 2, 3)]


class Deadly:
    """Counts durable effects and ends the process at one of them; 0 for never."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def both_sides(*args: Any, **kwargs: Any) -> Any:
            self()
            result = function(*args, **kwargs)
            self()
            return result

        return both_sides

    def install(self) -> None:
        for name in ("fsync", "replace", "rename", "link"):
            setattr(os, name, self.around(getattr(os, name)))
        deadly = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
                ends = sql == "COMMIT" or "INSERT" in sql
                return (deadly.around(super().execute) if ends else super().execute)(sql, *args)

            def commit(self) -> None:
                deadly.around(super().commit)()

        connect = functools.partial(sqlite3.connect, factory=Connection)
        sqlite3.connect = sqlite3.dbapi2.connect = connect  # type: ignore[assignment, attr-defined]


def trains(home: Path) -> Callable[[StubSite, RoundPlan, PrivateUpdate], SealedUpdate]:
    """A site that notes what it is charged for: the first time it sees a plan, not the second."""

    def hand_over(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        stored = home / "sites" / site.name / plan.digest
        if not stored.exists():
            stored.parent.mkdir(parents=True, exist_ok=True)
            partial = home / f"{site.name}-{plan.digest}"
            partial.write_text(str(plan.round))
            partial.replace(stored)  # whole, also where this process is killed meanwhile
        return site.sealed(plan, update)

    return hand_over


def aggregate(home: Path, rounds: int) -> None:
    """Run what is left, as a process that was just started."""
    for site in SITES:
        site.misbehave = trains(home)
    hub = Hub(home / "hub", HUB_KEY, base_model="m", clock=clock, thresholds=Thresholds(minimum_time_s=0.0))
    if not hub.catalog.versions() or hub.catalog.versions()[0].stage is Stage.CANDIDATE:
        hub.found(START, base_digest=BASE)
    run(SITES, hub, rule="mean", rounds=rounds)
    hub.close()


def check(home: Path, rounds: int) -> None:
    """Nothing lost, nothing counted twice, privacy charged once, nothing half-published."""
    hub = Hub(home / "hub", HUB_KEY, base_model="m", clock=clock)
    log = RoundLog(home / "hub" / "rounds")
    names = tuple(site.name for site in SITES)
    assert [record.stage for record in log.records()] == [Stage.STABLE] * (rounds - 1) + [Stage.STABLE]
    assert [record.participants for record in log.records()] == [names] * rounds
    assert [version.id for version in hub.catalog.versions()] == [f"v{n}" for n in range(rounds + 1)]
    assert hub.stable.id == f"v{rounds}"
    channel = hub.repository.channel()
    assert channel is not None and (channel.stable, channel.canary) == (f"v{rounds}", None)
    assert {f.name for f in (home / "hub" / "repository" / "versions").iterdir()} == {
        version.id for version in hub.catalog.versions()
    }
    for number in range(1, rounds + 1):
        plan = log.plan(number)
        assert hub.version(f"v{number}").lineage.plan_digest == plan.digest
        mean = np.mean([site.update(plan).delta_D for site in SITES], axis=0)
        factor = START.names(plan.lora_phase)
        moved = hub.adapter(f"v{number}").flatten(factor) - hub.adapter(f"v{number - 1}").flatten(factor)
        np.testing.assert_allclose(moved, mean, atol=1e-6)
        assert log.step(number) is Step.CLOSED and log.sealing_key(number) is None
    for name in names:  # one charge for each round
        charged = sorted((int(f.read_text()), f.name) for f in (home / "sites" / name).iterdir())
        assert charged == [(number, log.plan(number).digest) for number in range(1, rounds + 1)]
    windows = [len(hub.catalog.evidence(f"v{number}")) for number in range(1, rounds + 1)]
    assert max(windows) - min(windows) <= 1, windows  # killed between a window and its verdict, one more is asked for
    hub.close()
    log.close()


def forked(work: Callable[[], None]) -> int:
    """Exit status of a child: 0, or -9 where it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(arguments: Sequence[str]) -> None:
    folder, rounds, every = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    at, killed = 1, 0
    while True:
        home = folder / str(at)
        home.mkdir()

        def dies(home: Path = home, at: int = at) -> None:
            Deadly(at).install()
            aggregate(home, rounds)

        status = forked(dies)
        assert status in (0, -signal.SIGKILL), f"effect {at}: the first process ended with {status}"
        if status == 0:
            break
        killed += 1

        def goes_on(home: Path = home) -> None:
            aggregate(home, rounds)
            check(home, rounds)

        assert forked(goes_on) == 0, f"after a kill at effect {at} the round did not go on"
        at += every
    print(json.dumps({"effects": at, "killed": killed}))


if __name__ == "__main__":
    main(sys.argv[1:])
