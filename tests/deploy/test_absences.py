"""Sites that drop out of rounds or are too slow for them, over the in-process grid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.adapter import Adapter, LoraShape, initial_adapter
from deploy.absences import Absence, Absences, faults
from deploy.local_grid import FIRST_NODE_ID
from model_hub.hub import Hub
from tests.aggregator.stub import new_hub, run, six

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
