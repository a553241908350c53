"""Updates held against what public data teach: who is left out, by how much, and what a reference cannot do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.combine import BESIDE_REFERENCE, OpenRound, choose, combine
from aggregator.federation import Federation
from aggregator.flower_sites import FlowerSites
from aggregator.plan import make_plan
from aggregator.round_log import RoundRecord
from aggregator.rules import tolerated_liars
from aggregator.server_app import Reference, phase_shapes, run_rounds
from aggregator.witness import Witness
from common.adapter import Adapter
from common.errors import PrivacyError
from common.plan import RoundPlan
from common.update import Aggregate, Refusal, Voided
from model_hub.hub import Hub
from tests.aggregator.stub import StubSite, clock, federation_of, grid_of, home_of, log_of, new_hub, sends, six
from tests.aggregator.test_choosing import flipped
from tests.aggregator.test_plan import SEALING

DIMENSION = 20_000
REASON = "it points against what public data teach"


@pytest.fixture
def hubs(tmp_path: Path, start: Adapter) -> Iterator[Hub]:
    hub = new_hub(tmp_path / "hub", start)
    yield hub
    hub.close()


def sites(count: int, start: Adapter) -> list[StubSite]:
    return [StubSite(f"site-{number}", start) for number in range(1, count + 1)]


def plan_of(federation: Federation, hub: Hub) -> RoundPlan:
    return make_plan(federation, hub.stable, hub.adapter(hub.stable.id), number=1, sealing_key=SEALING, now_s=0.0)


def noise(rng: np.random.Generator) -> np.ndarray:
    drawn = rng.normal(size=DIMENSION)
    return drawn / np.linalg.norm(drawn)


def faint(count: int, *, flip: int, cosine: float = 0.004, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Updates that are noise but for a direction which any two share by so much; the last ones turned round."""
    rng = np.random.default_rng(seed)
    signal_D, share = noise(rng), np.sqrt(cosine)
    updates = {}
    for number in range(1, count + 1):
        update_D = share * signal_D + np.sqrt(1 - share**2) * noise(rng)
        sign = -1.0 if number > count - flip else 1.0
        updates[f"site-{number}"] = (sign * rng.uniform(0.5, 2.0) * update_D).astype(np.float32)
    return updates, signal_D


def left_out(outcome: Aggregate | Voided) -> list[tuple[str, str, str]]:
    return [(r.site, r.stage, r.reason) for r in outcome.refusals]


@pytest.mark.parametrize("rule", ["mean", "nnm-trimmed-mean", "dnc", "median"])
def test_negated_updates_are_left_out_by_name_whatever_the_rule(rule: str, hubs: Hub, start: Adapter) -> None:
    federation = federation_of(sites(12, start), rule=rule)
    updates, signal_D = faint(12, flip=2)
    honest_D = np.mean([updates[f"site-{n}"] for n in range(1, 11)], axis=0)
    outcome = choose(plan_of(federation, hubs), dict(updates), [], federation, alert=False, reference_D=signal_D)
    assert isinstance(outcome, Aggregate)
    assert sorted(left_out(outcome)) == [(f"site-{n}", "select", REASON) for n in (11, 12)]
    assert outcome.participants == tuple(sorted(f"site-{n}" for n in range(1, 11)))
    assert outcome.rule == rule + BESIDE_REFERENCE
    if rule == "mean":
        assert np.allclose(outcome.delta_D, honest_D, atol=1e-6)
    without = choose(plan_of(federation, hubs), dict(updates), [], federation, alert=False)
    assert isinstance(without, Aggregate) and without.rule == rule and not left_out(without)


def test_the_reference_itself_is_never_in_the_result(hubs: Hub, start: Adapter) -> None:
    federation = federation_of(sites(6, start), rule="mean")
    updates, signal_D = faint(6, flip=0)
    plan = plan_of(federation, hubs)
    results = [
        choose(plan, dict(updates), [], federation, alert=False, reference_D=reference_D)
        for reference_D in (None, signal_D, 1e6 * signal_D, np.zeros(DIMENSION))
    ]
    assert all(isinstance(result, Aggregate) for result in results)
    assert len({result.delta_D.tobytes() for result in results if isinstance(result, Aggregate)}) == 1


def test_no_more_are_left_out_than_are_tolerated_the_clearest_first(hubs: Hub, start: Adapter) -> None:
    federation = federation_of(sites(13, start), rule="median")
    updates, signal_D = faint(13, flip=5)
    for number in (9, 10, 11):  # clearer than the others
        updates[f"site-{number}"] -= (0.3 * signal_D * np.linalg.norm(updates[f"site-{number}"])).astype(np.float32)
    outcome = choose(plan_of(federation, hubs), updates, [], federation, alert=False, reference_D=signal_D)
    assert isinstance(outcome, Aggregate)
    assert tolerated_liars(13) == 3
    assert sorted(r.site for r in outcome.refusals) == ["site-10", "site-11", "site-9"]


@pytest.mark.parametrize(("rule", "sites_in_hand"), [("multi-krum", 5), ("mean", 4)])
def test_a_quorum_is_kept(rule: str, sites_in_hand: int, hubs: Hub, start: Adapter) -> None:
    federation = federation_of(sites(6, start), rule=rule)
    assert federation.quorum == sites_in_hand
    updates, signal_D = faint(6, flip=1)
    for number in range(1, 7 - sites_in_hand):
        del updates[f"site-{number}"]
    outcome = choose(plan_of(federation, hubs), updates, [], federation, alert=False, reference_D=signal_D)
    assert isinstance(outcome, Aggregate) and not left_out(outcome)


def test_what_the_reference_leaves_out_counts_against_what_the_rule_may(hubs: Hub, start: Adapter) -> None:
    """One of the two negated updates is so far from all others that `dnc` would leave it out, and two more."""
    federation = federation_of(sites(9, start), rule="dnc")
    updates, signal_D = faint(9, flip=2)
    rng = np.random.default_rng(3)
    together = noise(rng)
    for number in (1, 2):
        updates[f"site-{number}"] = (0.9 * together + 0.1 * noise(rng) + 0.3 * signal_D).astype(np.float32)
    plan = plan_of(federation, hubs)
    without = choose(plan, dict(updates), [], federation, alert=False)
    outcome = choose(plan, dict(updates), [], federation, alert=False, reference_D=signal_D)
    assert isinstance(without, Aggregate) and {r.site for r in without.refusals} == {"site-1", "site-2"}
    assert isinstance(outcome, Aggregate)
    assert {r.site for r in outcome.refusals if r.reason == REASON} == {"site-8", "site-9"}
    assert tolerated_liars(9) == 2 and len(outcome.participants) >= 9 - 2 - 2


def test_a_reference_that_most_updates_contradict_is_not_believed(hubs: Hub, start: Adapter) -> None:
    federation = federation_of(sites(9, start), rule="mean")
    plan = plan_of(federation, hubs)
    updates, signal_D = faint(9, flip=0)
    strange_D = noise(np.random.default_rng(77))
    for reference_D in (-signal_D, strange_D):
        outcome = choose(plan, dict(updates), [], federation, alert=False, reference_D=reference_D)
        assert isinstance(outcome, Aggregate) and not left_out(outcome)


# --- in whole rounds


def rounds(hub: Hub, roster: list[StubSite], reference: Reference | None, **settings: object) -> list[RoundRecord]:
    federation = federation_of(roster, **settings)  # type: ignore[arg-type]
    witness = Witness(home_of(hub) / "witness.json")
    with grid_of(roster) as grid, log_of(hub) as log:
        return run_rounds(
            grid, federation, hub, witness, log, clock=clock, wait=lambda reason: None, reference=reference
        )


def test_a_whole_round_asks_for_the_reference_of_its_plan(hubs: Hub, start: Adapter) -> None:
    roster, asked = six(start, site_6=sends(flipped)), []

    def reference(plan: RoundPlan) -> np.ndarray:
        asked.append(plan)
        return roster[0].update(plan).delta_D

    (record,) = rounds(hubs, roster, reference, rule="mean")
    assert [(r.site, r.stage, r.reason) for r in record.refused] == [("site-6", "select", REASON)]
    assert [plan.round for plan in asked] == [1]
    assert hubs.version(str(record.version)).lineage.rule == "mean" + BESIDE_REFERENCE
    assert roster[5].asked == []  # no say in the canary


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "no public data were recorded"),
        (lambda size: np.zeros(size, np.float32), "public data teach nothing here"),
        (lambda size: np.full(size, np.nan, np.float32), "public data teach nothing here"),
        (lambda size: np.ones(size - 1, np.float32), "the reference has the shape"),
        (lambda size: np.empty(-size, np.float32), "ValueError"),
    ],
)
def test_a_round_goes_on_without_a_reference_that_fails_and_says_so(
    change: Callable[[int], np.ndarray] | None,
    reason: str,
    hubs: Hub,
    start: Adapter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reference(plan: RoundPlan) -> np.ndarray:
        if change is None:
            raise PrivacyError("no public data were recorded")
        return change(start.flatten(start.names("B")).size)

    with caplog.at_level(logging.WARNING, logger="headwater.aggregator"):
        (record,) = rounds(hubs, six(start), reference, rule="mean")
    assert len(record.participants) == 6
    assert hubs.version(str(record.version)).lineage.rule == "mean"
    assert "round without a reference" in caplog.text and reason in caplog.text


def test_nobody_trains_a_reference_for_a_round_without_a_quorum(hubs: Hub, start: Adapter) -> None:
    roster = six(start)
    federation = federation_of(roster, timeout_s=0.5)
    current = OpenRound(plan_of(federation, hubs), SEALING, phase_shapes(start, "B"))

    def never() -> np.ndarray:
        raise AssertionError("asked in vain")

    witness = Witness(home_of(hubs) / "witness.json")
    with grid_of(roster[:2]) as grid:
        connected = FlowerSites(grid, federation)
        connected.refresh()
        outcome = combine(replace(current, reference=never), connected, federation, witness)
    assert isinstance(outcome, Voided)
    assert Refusal("site-6", "identify", "no node proved to be it") in outcome.refusals
