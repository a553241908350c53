from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import event

from common.adapter import Adapter
from common.errors import RoundError, TransportError, TrustError
from common.identity import SigningKey
from model_hub.evidence import Decision, Thresholds, judge
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
    assert hub.observe({"site-1": outcomes(60, difference=0.5)}).decision is Decision.WAIT
    clock.now += 1200
    assert hub.observe({"site-1": outcomes(80, difference=0.5, seed=1)}).decision is Decision.PROMOTE
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
    assert hub.observe({"site-1": outcomes(20, canary_errors=1.0)}).decision is Decision.ROLL_BACK
    assert channel(hub) == ("v0", None, 0.0)
    assert hub.catalog.versions()[1].stage is Stage.ROLLED_BACK
    with pytest.raises(RoundError, match="no canary"):
        hub.observe({})


def test_evidence_of_one_canary_is_not_used_for_the_next(hub: Hub, start: Adapter, clock: Clock) -> None:
    hub.start_canary(submit(hub, start))
    hub.observe({"site-1": outcomes(20, canary_errors=1.0)})
    hub.start_canary(submit(hub, start, seed=2))
    clock.now += 1200
    assert hub.observe({"site-1": outcomes(5)}).requests == 5


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


def test_a_reopened_hub_goes_on_in_the_middle_of_a_canary(
    hub: Hub, start: Adapter, clock: Clock, tmp_path: Path
) -> None:
    hub.start_canary(submit(hub, start))
    clock.now += 1200
    hub.observe({"site-1": outcomes(60, difference=0.5)})
    hub.close()
    again = Hub(tmp_path, KEY, base_model="embedded", clock=clock)
    assert again.adapter("v0").digest == start.digest
    clock.now += 1200
    verdict = again.observe({"site-1": outcomes(80, difference=0.5, seed=1)})
    assert (verdict.decision, verdict.requests) == (Decision.PROMOTE, 140)
    reader = RepositoryReader(again.repository.folder, hub_public=KEY.public)
    assert reader.channel(at_least=2).stable == "v1"  # the sequence went on, so sites follow
    assert again.catalog.evidence("v1")[-1].verdict.decision is Decision.PROMOTE
    again.close()


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("decision", ["start", "promote", "roll back"])
def test_a_hub_killed_before_it_pointed_points_when_it_is_opened(
    hub: Hub, start: Adapter, clock: Clock, tmp_path: Path, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = submit(hub, start)
    if decision != "start":
        hub.start_canary(version)
    clock.now += 1200
    made = outcomes(200, difference=0.5) if decision == "promote" else outcomes(20, canary_errors=1.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Hub, "_point", killed)
        hub.start_canary(version) if decision == "start" else hub.observe({"site-1": made})
    hub.close()
    again = Hub(tmp_path, KEY, base_model="embedded", clock=clock)
    expected = {"start": ("v0", "v1", 0.05), "promote": ("v1", None, 0.0), "roll back": ("v0", None, 0.0)}
    assert channel(again) == expected[decision]
    again.close()


def test_a_hub_killed_while_publishing_can_publish_again(
    hub: Hub, start: Adapter, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(hub.catalog), "add", killed)
        submit(hub, start)
    hub.close()
    again = Hub(tmp_path, KEY, base_model="embedded", clock=clock)
    assert submit(again, start).id == "v1"
    again.close()


def test_a_hub_killed_while_it_was_founded_can_be_founded_again(start: Adapter, clock: Clock, tmp_path: Path) -> None:
    for step in ("add", "move"):
        folder = tmp_path / step
        folder.mkdir()
        first = Hub(folder, KEY, base_model="embedded", clock=clock)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(first.catalog), step, killed)
            first.found(start, base_digest=BASE)
        first.close()
        again = Hub(folder, KEY, base_model="embedded", clock=clock)
        again.found(start, base_digest=BASE)
        assert channel(again) == ("v0", None, 0.0)
        again.close()


def test_a_liar_that_falls_silent_still_counts_as_one_that_reported(hub: Hub, start: Adapter, clock: Clock) -> None:
    hub.start_canary(submit(hub, start))
    honest = {f"site-{i}": outcomes(40, difference=0.3, seed=i) for i in range(4)}
    hub.observe({**honest, "site-9": outcomes(20, canary_errors=1.0)})
    clock.now += 1200
    verdict = hub.observe({f"site-{i}": outcomes(40, difference=0.3, seed=10 + i) for i in range(4)})
    assert verdict.decision is not Decision.ROLL_BACK
    assert verdict.canary_errors == 0


def test_a_channel_that_cannot_be_written_is_a_transport_error(
    hub: Hub, start: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = submit(hub, start)
    (hub.repository.folder / ".channel.json.partial").mkdir()
    with pytest.raises(TransportError, match="channel"):
        hub.start_canary(version)
    assert channel(hub) == ("v0", None, 0.0)


def test_a_full_disk_is_a_transport_error_and_changes_nothing(hub: Hub, start: Adapter) -> None:
    version = submit(hub, start)
    engine = hub.catalog._engine
    engine.dispose()
    full = "PRAGMA max_page_count = 1"
    event.listen(engine, "connect", lambda connection, _: connection.execute(full))
    with pytest.raises(TransportError, match="catalog could not be written"):
        for _ in range(500):
            hub.catalog.record_evidence(version.id, judge([], elapsed_s=0, thresholds=Thresholds()), {}, at_s=0.0)
    assert hub.version(version.id).stage is Stage.GATED


def test_changed_files_are_not_used(hub: Hub, start: Adapter, tmp_path: Path) -> None:
    file = hub.repository.folder / "versions" / "v0" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = Hub(tmp_path, KEY, base_model="embedded", clock=lambda: 0.0)
    with pytest.raises(TrustError, match="were changed"):
        again.adapter("v0")
    again.close()


def test_published_adapters_verify_and_load(hub: Hub, start: Adapter) -> None:
    version = submit(hub, start)
    reader = RepositoryReader(hub.repository.folder, hub_public=KEY.public)
    assert reader.adapter(version.id, like=start, base_digest=BASE).digest == version.digest
