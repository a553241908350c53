"""Kill -9 of an aggregator in a secure mode, its sites living on, then start it again; run as a program by `test_killed`.

    python -m tests.aggregator.killed_secure FOLDER MODE ROUNDS EVERY [session]

The aggregator is a forked child with files of its own, which asks its sites over pipes; the sites are the product's
sessions in this process. It dies before or after a step of a session, or a durable effect of its own (see `killed`),
of which the choice, the witness, the aggregate and the version are some; with `session`, only up to the aggregate.
What must hold afterwards is in `check`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from aggregator.round_log import RoundLog, Step
from aggregator.secure_round import _Asking
from aggregator.witness import Witness
from common.adapter import LoraShape, initial_adapter
from common.errors import HeadwaterError
from common.plan import RoundPlan
from common.secagg import MODES, SUM_ONLY
from common.update import Aggregate, PrivateUpdate
from edge_node.secure_session import UpdateRecords
from model_hub.evidence import Thresholds
from model_hub.hub import Hub
from model_hub.rollout import Stage
from tests.aggregator.killed import Deadly, forked
from tests.aggregator.stub import BASE, StubSite, clock, head, new_key, run
from tests.aggregator.test_secure_round import SecureStub

SIZE = {SUM_ONLY: 16, MODES[1]: 1280}
"""Of a module: a sketch needs 10 000 parameters."""

HUB_KEY = new_key()


@dataclass
class Paying(SecureStub):
    """Notes what it trained for: the first time it sees a plan, not the second."""

    paid: list[str] = field(default_factory=list)

    def update(self, plan: RoundPlan) -> PrivateUpdate:
        if plan.digest not in self.paid:
            self.paid.append(plan.digest)
        return super().update(plan)


@dataclass
class FarSite(StubSite):
    """A site as the aggregator's process knows it."""

    line: Connection | None = None

    def secure_answer(
        self, payload: bytes, signature: bytes, witness: str, *, mode: str, request: bytes
    ) -> bytes | None:
        assert self.line is not None
        self.line.send((payload, signature, witness, mode, request))
        answer, error, public = self.line.recv()
        if error is not None:
            raise error("a site's own reason", public=public)
        return answer


@contextmanager
def far(sites: Sequence[SecureStub]) -> Iterator[list[FarSite]]:
    """The sites for children that are forked within; what a child had asked when it died is answered to nobody."""
    lines = [Pipe() for _ in sites]
    serving = [threading.Thread(target=serve, args=(site, ours)) for site, (ours, _) in zip(sites, lines, strict=True)]
    for thread in serving:
        thread.start()
    try:
        yield [FarSite(s.name, s.adapter, s.key, line=theirs) for s, (_, theirs) in zip(sites, lines, strict=True)]
    finally:
        for _, theirs in lines:
            theirs.close()
        for thread in serving:
            thread.join()


def serve(site: SecureStub, line: Connection) -> None:
    """Answer until nobody can ask any more."""
    while True:
        try:
            payload, signature, witness, mode, request = line.recv()
            try:
                said = site.secure_answer(payload, signature, witness, mode=mode, request=request), None, ""
            except HeadwaterError as error:
                said = None, type(error), error.public
            line.send(said)
        except (EOFError, OSError):
            return


class DeadlyStep(Deadly):
    """Dies before or after a step of a session too; where `at_session`, only from the first one to the aggregate."""

    def __init__(self, at: int, *, at_session: bool) -> None:
        super().__init__(at)
        self.counts, self.at_session = not at_session, at_session

    def __call__(self) -> None:
        if self.counts:
            super().__call__()

    def install(self) -> None:
        super().install()
        step, combined = self.around(_Asking.__call__), self.around(RoundLog.combined)

        def begun(asking: _Asking, requests: Mapping[str, bytes]) -> dict[str, bytes]:
            self.counts = True
            return step(asking, requests)

        def ended(log: RoundLog, number: int, aggregate: Aggregate) -> None:
            combined(log, number, aggregate)
            self.counts = not self.at_session

        _Asking.__call__, RoundLog.combined = begun, ended  # type: ignore[method-assign, assignment]


def aggregate(home: Path, sites: list[FarSite], mode: str, rounds: int) -> None:
    """Run what is left, as a process that was just started."""
    hub = Hub(home / "hub", HUB_KEY, base_model="m", clock=clock, thresholds=Thresholds(minimum_time_s=0.0))
    if not hub.catalog.versions() or hub.catalog.versions()[0].stage is Stage.CANDIDATE:
        hub.found(sites[0].adapter, base_digest=BASE)
    run(list(sites), hub, rule="mean", aggregation=mode, rounds=rounds, timeout_s=60.0)
    hub.close()


@dataclass(frozen=True)
class Death:
    """How far things were when the aggregator died: its last round, and the sites' updates for it."""

    number: int
    step: Step | None
    states: frozenset[str]

    @classmethod
    def of(cls, home: Path, sites: Sequence[SecureStub]) -> Death:
        if not (home / "hub" / "rounds" / "rounds.sqlite").exists():
            return cls(0, None, frozenset())
        log = RoundLog(home / "hub" / "rounds", owned=False)
        number = log.number
        step = log.step(number) if number else None
        log.close()
        return cls(number, step, frozenset(site.state(number) for site in sites))

    @property
    def loses_the_round(self) -> bool:
        """Updates whose sketch was opened, or that are committed to a sum, and no sum of them is stored."""
        return self.step is Step.OPEN and bool(self.states & {"opened", "committed"})


def check(home: Path, rounds: int, sites: Sequence[Paying], death: Death) -> None:
    """Finished or voided as the sites' records demand; nothing published or summed twice, each site paid once a round."""
    hub = Hub(home / "hub", HUB_KEY, base_model="m", clock=clock)
    log = RoundLog(home / "hub" / "rounds")
    records, start = log.records(), sites[0].adapter
    assert [record.number for record in records] == list(range(1, rounds + 1))
    lost = [record.number for record in records if record.version is None]
    assert lost == [death.number] * death.loses_the_round, (death, records)
    published = [record for record in records if record.version is not None]
    versions = hub.catalog.versions()
    assert [version.id for version in versions] == [f"v{n}" for n in range(len(published) + 1)]
    assert [version.lineage.plan_digest for version in versions[1:]] == [log.plan(r.number).digest for r in published]
    assert {f.name for f in (home / "hub" / "repository" / "versions").iterdir()} == {v.id for v in versions}
    channel = hub.repository.channel()
    assert channel is not None and (channel.stable, channel.canary) == (versions[-1].id, None)
    names = tuple(site.name for site in sites)
    for record in published:
        plan, made = log.plan(record.number), str(record.version)
        assert record.stage is Stage.STABLE and log.step(record.number) is Step.CLOSED
        assert frozenset(record.participants) == log.choices()[record.number]
        assert len(record.participants) >= 3 and set(record.participants) <= set(names)
        mean_D = np.mean([site.update(plan).delta_D for site in sites if site.name in record.participants], axis=0)
        factor = start.names(plan.lora_phase)
        moved_D = hub.adapter(made).flatten(factor) - hub.adapter(plan.adapter_version).flatten(factor)
        np.testing.assert_allclose(moved_D, mean_D, atol=1e-6)
        for site in sites:
            kept = UpdateRecords(site.folder).get("test", record.number)
            assert kept is not None and kept.included == record.participants, "it signed this sum and no other"
    for site in sites:
        assert site.paid == [log.plan(number).digest for number in range(1, rounds + 1)]
        sent = [UpdateRecords(site.folder).get("test", number) for number in range(1, rounds + 1)]
        assert all(kept is None or kept.uploads <= 2 for kept in sent)
        if published:
            assert Witness(home / "hub" / "witness.json").head(site.key.public) == head(site.key)
    hub.close()
    log.close()


def sites_on(folder: Path, mode: str) -> list[Paying]:
    module = {"model.layers.0.self_attn.q_proj": (SIZE[mode], SIZE[mode])}
    adapter = initial_adapter(module, LoraShape(8, 8.0, ("q_proj",)), seed=0)
    count = 3 if mode == SUM_ONLY else 4
    sites = [Paying(f"site-{i}", adapter, folder=folder / f"s{i}") for i in range(1, count + 1)]
    for site in sites:
        site.roster = {other.name: other.key.public for other in sites}
    return sites


def main(arguments: Sequence[str]) -> None:
    folder, mode, rounds, every = Path(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3])
    at, deaths = 1, []
    while True:
        home = folder / str(at)
        home.mkdir()
        sites = sites_on(home / "sites", mode)

        def dies(home: Path = home, at: int = at, sites: Sequence[Paying] = sites) -> None:
            DeadlyStep(at, at_session=arguments[4:] == ["session"]).install()
            aggregate(home, far_sites, mode, rounds)

        with far(sites) as far_sites:
            status = forked(dies)
        assert status in (0, -signal.SIGKILL), f"effect {at}: the first process ended with {status}"
        if status == 0:
            break
        deaths.append(death := Death.of(home, sites))
        with far(sites) as far_sites:
            goes_on = forked(lambda home=home, sites=far_sites: aggregate(home, sites, mode, rounds))  # type: ignore[misc]
        assert goes_on == 0, f"after a kill at effect {at}, {death}, the aggregator did not go on"
        check(home, rounds, sites, death)
        at += every
    print(json.dumps({"killed": len(deaths), "lost": sum(death.loses_the_round for death in deaths)}))


if __name__ == "__main__":
    main(sys.argv[1:])
