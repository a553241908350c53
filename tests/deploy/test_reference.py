"""The reference of a simulation: a real node on public problems, trained for the plan without noise and without charge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.plan import make_plan
from common.identity import SealingKey
from common.inference.model_folder import ModelFolder
from common.plan import RoundPlan
from common.tasks import math as task
from deploy.founding import build_world
from deploy.reference import PublicReference
from deploy.settings import SimulationSettings
from deploy.simulated_site import open_site
from deploy.world import Silent, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: ModelFolder) -> Iterator[World]:
    settings = SimulationSettings(sites=4, attack="none", min_samples=0, aggregation="secagg_sketch", rule="mean")
    world = build_world(settings, model, tmp_path_factory.mktemp("reference"), Silent())
    yield world
    world.close()


def plan_of(world: World, number: int = 1) -> RoundPlan:
    sealing = SealingKey(X25519PrivateKey.generate())
    start = world.hub.adapter("v0")
    return make_plan(world.federation, world.hub.stable, start, number=number, sealing_key=sealing, now_s=world.clock())


def test_without_data_there_is_no_reference_and_with_data_it_is_the_same_each_time(world: World) -> None:
    assert world.reference is not None
    site = open_site(world.reference)
    node, plan = site.node, plan_of(world)
    reference = PublicReference(node, world.hub.adapter)
    assert not reference(plan_of(world)).any()  # which counts as none
    site.look_again()
    world.clock.set(world.clock() + 60.0)
    site.serve_users(30, seed=5)
    world.clock.set(world.clock() + 60.0)
    change_D = reference(plan)
    start = world.hub.adapter("v0")
    assert change_D.shape == start.flatten(start.names("B")).shape and change_D.any()
    assert np.array_equal(reference(plan), change_D)
    assert node.training.ledger.charges() == []


def test_it_is_in_no_roster_and_its_problems_are_those_of_nobody_in_particular(world: World) -> None:
    assert world.reference is not None
    assert world.reference.config.name not in world.federation.roster
    assert len(world.federation.roster) == len(world.setups) == 4
    assert world.reference.distribution == task.Distribution()
    assert world.reference.hostility is None
    assert not (world.folder / "sites" / "reference").exists()


def test_every_policy_allows_the_direction_that_the_federation_uses(world: World) -> None:
    assert world.federation.limits.directions == 1
    for setup in world.setups:
        assert "directions = 1" in setup.config.policy.read_text()


@pytest.mark.parametrize(
    ("changed", "used", "directions"),
    [
        ({"aggregation": "sealed"}, True, 0),
        ({"aggregation": "secagg"}, False, 0),
        ({"aggregation": "secagg_sketch", "reference": False}, False, 0),
    ],
)
def test_who_has_a_reference(
    changed: dict[str, object], used: bool, directions: int, tmp_path: Path, model: ModelFolder
) -> None:
    settings = SimulationSettings.model_validate({"sites": 4, "attack": "none", "rule": "mean", **changed})
    world = build_world(settings, model, tmp_path, Silent())
    try:
        assert (world.reference is not None) is used
        assert world.federation.limits.directions == directions
        assert all(f"directions = {directions}" in setup.config.policy.read_text() for setup in world.setups)
    finally:
        world.close()
