"""Sites that drop out of rounds or are too slow for them, over the in-process grid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.adapter import Adapter, LoraShape, initial_adapter
from common.secagg import SKETCH, SUM_ONLY
from common.secagg.context import DEFAULT_LIMITS, quorum_of
from deploy.absences import Absence, Absences, faults
from deploy.local_grid import FIRST_NODE_ID
from deploy.settings import SimulationSettings
from deploy.simulate import _faults
from model_hub.hub import Hub
from tests.aggregator.stub import StubSite, federation_of, new_hub, run, six
from tests.aggregator.test_secure_round import check_published, secure, sites_of

SITES = tuple(f"site-{i}" for i in range(1, 7))
ROUNDS = 4


@pytest.fixture
def start() -> Adapter:
    return initial_adapter({"m.q_proj": (6, 8)}, LoraShape(2, 4.0, ("q_proj",)), seed=0)


@pytest.fixture
def hub(tmp_path: Path, start: Adapter) -> Iterator[Hub]:
    opened = new_hub(tmp_path / "hub", start)
    yield opened
    opened.close()


def test_who_is_away_is_refused_and_only_the_slow_have_trained(hub: Hub, start: Adapter) -> None:
    absences = Absences(SITES, 0.3, 0.3, most=2, seed=1)
    sites = six(start)
    records = run(
        sites,
        hub,
        rule="mean",
        rounds=ROUNDS,
        faults=faults(absences, lambda node: SITES[node - FIRST_NODE_ID], ("train",)),
    )
    kinds = set()
    for record in records:
        away = absences.in_round(record.number)
        kinds |= set(away.values())
        assert {refusal.site for refusal in record.refused} == set(away)
        assert set(record.participants) == set(SITES) - set(away)
        for site in sites:
            trained = any(plan.round == record.number for plan in site.plans)
            assert trained == (away.get(site.name) is not Absence.DROPPED)
    assert len(records) == ROUNDS
    assert kinds == set(Absence)  # the seed shows both


def test_a_late_update_is_offered_a_later_round(hub: Hub, start: Adapter) -> None:
    absences = Absences(SITES, 0.0, 0.5, most=1, seed=2)
    sites = six(start)
    run(
        sites,
        hub,
        rule="mean",
        rounds=ROUNDS,
        lora_mode="ffa",
        faults=faults(absences, lambda node: SITES[node - FIRST_NODE_ID], ("train",)),
    )
    (late,) = absences.in_round(1)
    site = next(site for site in sites if site.name == late)
    missed = next(plan.digest for plan in site.plans if plan.round == 1)
    offered = [earlier for plan, earlier in zip(site.plans, site.earlier, strict=True) if plan.round > 1]
    assert any(missed in earlier for earlier in offered)


def gone_in(fault: Any, numbers: range, *, sites: int) -> set[int]:
    """Sites whose answer to a round's first message is not there, in any of these rounds."""

    def asked(site: int, number: int) -> Any:
        metadata = SimpleNamespace(message_type="query.secagg", dst_node_id=FIRST_NODE_ID + site)
        request = {"payload": json.dumps({"round": number})}
        return SimpleNamespace(metadata=metadata, content={"request": request})

    return {site for site in range(sites) for number in numbers if fault(asked(site, number)) is not None}


@pytest.mark.parametrize("mode", [SUM_ONLY, SKETCH])
def test_absences_of_a_simulation_leave_a_secure_sum_its_sites_beside_the_attackers(mode: str, start: Adapter) -> None:
    """In each window of rounds, since a site that was away once is out of the rest of it."""
    federation = federation_of([StubSite(f"site-{i}", start) for i in range(1, 21)], rule="mean", aggregation=mode)
    window = DEFAULT_LIMITS.window
    for seed in range(8):
        settings = SimulationSettings(
            sites=20, attack="sign-flip:4", aggregation=mode, rounds=2 * window, drop=0.3, slow=0.2, seed=seed
        )
        fault = _faults(SimpleNamespace(settings=settings, federation=federation))  # type: ignore[arg-type]
        for first in (1, 1 + window):
            gone = gone_in(fault, range(first, first + window), sites=20)
            assert gone and 20 - 4 - len(gone) >= quorum_of(20), (seed, first, gone)


def test_secure_rounds_go_on_without_the_dropped_and_the_slow(tmp_path: Path, hub: Hub, start: Adapter) -> None:
    """A slow site has trained, and its update belongs to that round's plan: it is not taken later."""
    absences = Absences(SITES, 0.2, 0.2, most=2, seed=0, rounds=10)
    away = absences.in_round(1)
    assert set(away.values()) == set(Absence)
    sites = sites_of(6, tmp_path, start)
    fault = faults(absences, lambda node: SITES[node - FIRST_NODE_ID], ("train", "query.secagg"))
    records = secure(sites, hub, rounds=2, faults=fault)
    assert [record.number for record in records] == [1, 2]
    for record in records:
        assert set(record.participants) == set(SITES) - set(away)
        assert {refusal.site for refusal in record.refused} == set(away)
        check_published(hub, sites, record)
    for site in sites:
        heard = away.get(site.name) is not Absence.DROPPED
        assert bool(site.heard) == heard and ("Offer" in site.heard) == (site.name not in away)
