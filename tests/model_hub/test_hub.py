from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.adapter import Adapter
from common.errors import RoundError
from common.identity import SigningKey
from model_hub.evidence import Decision
from model_hub.hub import Hub
from model_hub.repository import RepositoryReader
from model_hub.rollout import Stage
from model_hub.version import Lineage, ModelVersion
from tests.conftest import changed
from tests.model_hub.test_evidence import outcomes

BASE = "b" * 64
KEY = SigningKey(Ed25519PrivateKey.generate())


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(tmp_path: Path, start: Adapter, clock: Clock) -> Iterator[Hub]:
    hub = Hub(tmp_path, KEY, base_model="embedded", clock=clock)
    hub.found(start, base_digest=BASE)
    yield hub
    hub.close()


def submit(hub: Hub, start: Adapter, *, seed: int = 1, **options: bool) -> ModelVersion:
    lineage = Lineage(BASE, "p" * 64, ("site-1", "site-2"), "mean")
    return hub.submit(changed(start, seed=seed, scale=0.01), lineage=lineage, largest_change=3.0, **options)


def channel(hub: Hub) -> tuple[str, str | None, float]:
    found = RepositoryReader(hub.repository.folder, hub_public=KEY.public).channel(at_least=0)
    return found.stable, found.canary, found.canary_share


def test_a_good_version_becomes_stable_and_its_parent_retires(hub: Hub, start: Adapter, clock: Clock) -> None:
    version = submit(hub, start)
    assert version.stage is Stage.GATED
    assert channel(hub) == ("v0", None, 0.0)
    hub.start_canary(version)
    assert channel(hub) == ("v0", "v1", 0.05)
    clock.now += 1200
    assert hub.observe(outcomes(60, difference=0.2)).decision is Decision.WAIT
    clock.now += 1200
    assert hub.observe(outcomes(80, difference=0.2, seed=1)).decision is Decision.PROMOTE
    assert channel(hub) == ("v1", None, 0.0)
    assert {v.id: v.stage for v in hub.catalog.versions()} == {"v0": Stage.RETIRED, "v1": Stage.STABLE}
    assert [p.verdict.requests for p in hub.catalog.evidence("v1")] == [60, 140]
    assert hub.catalog.versions()[1].lineage == Lineage(BASE, "p" * 64, ("site-1", "site-2"), "mean")
    assert [t.stage for t in hub.catalog.transitions() if t.version == "v1"] == [
        Stage.CANDIDATE,
        Stage.GATED,
        Stage.CANARY,
        Stage.STABLE,
    ]


def test_a_bad_version_is_rolled_back_and_the_stable_one_stays(hub: Hub, start: Adapter) -> None:
    hub.start_canary(submit(hub, start))
    assert hub.observe(outcomes(20, canary_errors=1.0)).decision is Decision.ROLL_BACK
    assert channel(hub) == ("v0", None, 0.0)
    assert hub.catalog.versions()[1].stage is Stage.ROLLED_BACK
    with pytest.raises(RoundError, match="no canary"):
        hub.observe([])


def test_evidence_of_one_canary_is_not_used_for_the_next(hub: Hub, start: Adapter, clock: Clock) -> None:
    hub.start_canary(submit(hub, start))
    hub.observe(outcomes(20, canary_errors=1.0))
    hub.start_canary(submit(hub, start, seed=2))
    clock.now += 1200
    assert hub.observe(outcomes(5)).requests == 5


def test_gates_reject_what_no_round_could_have_made(hub: Hub, start: Adapter) -> None:
    for bad, expected in (
        (changed(start, seed=1, scale=5.0), "norm: the change"),
        (changed(start, seed=1, scale=float("inf")), "finite"),
        (Adapter(start.shape, dict(list(start.tensors.items())[1:])), "names differ"),
        (Adapter(start.shape, {n: t[:1] for n, t in start.tensors.items()}), "shapes differ"),
    ):
        version = hub.submit(bad, lineage=Lineage(BASE), largest_change=3.0)
        assert version.stage is Stage.REJECTED
        assert expected in version.reason
        with pytest.raises(ValueError, match="cannot go from rejected"):
            hub.start_canary(version)
    assert channel(hub) == ("v0", None, 0.0)


def test_one_canary_at_a_time(hub: Hub, start: Adapter) -> None:
    hub.start_canary(submit(hub, start))
    with pytest.raises(RoundError, match="still in canary"):
        hub.start_canary(submit(hub, start, seed=2))


def test_published_adapters_verify_and_load(hub: Hub, start: Adapter) -> None:
    version = submit(hub, start)
    reader = RepositoryReader(hub.repository.folder, hub_public=KEY.public)
    assert reader.adapter(version.id, like=start, base_digest=BASE).digest == version.digest
