"""What a round's rule leaves out is told by name, held against the site, and makes later rounds alert."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save

from aggregator.combine import choose
from aggregator.federation import Federation
from aggregator.plan import make_plan
from aggregator.round_log import RoundRecord
from aggregator.rules.vigilance import ALERT_ROUNDS
from aggregator.server_app import vigilance
from common.adapter import Adapter
from common.plan import RoundPlan
from common.update import Aggregate, PrivateUpdate, Refusal, Voided
from model_hub.hub import Hub
from model_hub.rollout import Stage
from tests.aggregator.stub import federation_of, run, sends, six
from tests.aggregator.test_plan import SEALING


def plan_of(federation: Federation, hub: Hub) -> RoundPlan:
    return make_plan(federation, hub.stable, hub.adapter(hub.stable.id), number=1, sealing_key=SEALING, now_s=0.0)


def flipped(update: PrivateUpdate) -> bytes:
    return save({name: -tensor for name, tensor in update.tensors.items()})


def test_a_site_that_is_left_out_is_named_has_no_vote_and_is_suspended_after_three_times(
    hub: Hub, start: Adapter
) -> None:
    sites = six(start, site_6=sends(flipped))
    records = run(sites, hub, rule="dnc", rounds=4)
    for record in records[:3]:
        assert record.participants == tuple(f"site-{i}" for i in range(1, 6))
        assert [(r.site, r.stage, r.reason) for r in record.refused] == [("site-6", "select", "left out by dnc")]
    assert sites[5].asked == []
    assert records[3].refused[0].site == "site-6"
    assert "an operator has to look" in records[3].refused[0].reason


def record(number: int, *, stage: Stage | None = Stage.STABLE, refused: tuple[Refusal, ...] = ()) -> RoundRecord:
    return RoundRecord(number, ("site-1",), refused, "v1", stage)


@pytest.mark.parametrize(
    "sign",
    [
        record(3, stage=Stage.REJECTED),
        record(3, stage=Stage.ROLLED_BACK),
        record(3, refused=(Refusal("site-2", "validate", "norm"),)),
    ],
)
def test_finished_rounds_make_later_ones_alert(sign: RoundRecord) -> None:
    assert not vigilance([record(1), record(2)]).alert(3)
    state = vigilance([record(1), record(2), sign, record(4)])
    assert [state.alert(number) for number in (4, 3 + ALERT_ROUNDS, 4 + ALERT_ROUNDS)] == [True, True, False]


def test_being_late_absent_or_unusual_is_no_sign_of_attack() -> None:
    refused = tuple(Refusal("site-2", stage, "…") for stage in ("identify", "train", "select"))
    assert not vigilance([record(1, refused=refused)]).alert(2)


@pytest.mark.parametrize("alert", [False, True])
def test_in_the_alert_state_as_many_are_left_out_as_could_lie(hub: Hub, start: Adapter, alert: bool) -> None:
    federation = federation_of(six(start), rule="dnc")
    rng = np.random.default_rng(0)
    halves = np.outer([1, 1, 1, -1, -1, -1], rng.normal(size=200)) + 0.1 * rng.normal(size=(6, 200))
    updates = {f"site-{i + 1}": row.astype(np.float32) for i, row in enumerate(halves)}
    made = choose(plan_of(federation, hub), updates, [], federation, alert=alert)
    assert isinstance(made, Aggregate)
    assert len(made.participants) == (5 if alert else 6)
    assert updates == {}


def test_a_rule_that_finds_nothing_usable_voids_the_round(hub: Hub, start: Adapter) -> None:
    federation = federation_of(six(start), rule="median")
    updates = {f"site-{i}": np.full(10, np.nan, np.float32) for i in range(1, 7)}
    with np.errstate(all="ignore"):
        made = choose(plan_of(federation, hub), updates, [], federation, alert=False)
    assert isinstance(made, Voided)
    assert "not finite" in made.reason
