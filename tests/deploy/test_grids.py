"""The same stored updates give the same combined bytes, whatever grid carries them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from aggregator.combine import OpenRound, combine
from aggregator.flower_sites import FlowerSites
from aggregator.plan import make_plan
from aggregator.server_app import phase_shapes
from aggregator.witness import Witness
from common.accounting import PrivateSteps
from common.identity import SealingKey, load_or_create_signing_key
from common.inference.model_folder import ModelFolder
from common.update import Aggregate, PrivateUpdate
from deploy.founding import build_world
from deploy.local_grid import LocalGrid
from deploy.ray_grid import run_on_ray
from deploy.settings import SimulationSettings
from deploy.simulated_site import make_simulated_client_app
from deploy.world import Silent, World
from edge_node.training.finished_updates import FinishedUpdates
from edge_node.training.ledger import Ledger
from edge_node.training.trainer import TRAINING, round_name


@pytest.fixture
def world(tmp_path: Path, model: ModelFolder) -> Iterator[World]:
    world = build_world(SimulationSettings(sites=3, attack="none"), model, tmp_path, Silent())
    yield world
    world.close()


def with_stored_updates(world: World) -> OpenRound:
    """A round for which every site has a finished update on its disk."""
    sealing = SealingKey(X25519PrivateKey.generate())
    start = world.hub.adapter("v0")
    plan = make_plan(world.federation, world.hub.stable, start, number=1, sealing_key=sealing, now_s=world.clock())
    shapes = phase_shapes(start, plan.lora_phase)
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    for index, setup in enumerate(world.setups):
        drawn = np.random.default_rng(index).normal(size=size)
        delta = (drawn * (plan.clip_norm / np.linalg.norm(drawn))).astype(np.float32)
        key = load_or_create_signing_key(setup.config.data_dir / "keys" / "identity.pem")
        ledger = Ledger(setup.config.data_dir / "ledger.sqlite", key)
        ledger.open_budget({TRAINING: PrivateSteps(2.0, 0.5, 2)}, now_s=1.0, unit="trajectory")
        entry = ledger.reserve(TRAINING, round_name(plan), plan.digest, epsilon_total=8.0, delta=1e-5, now_s=1.0)
        ledger.close()
        update = PrivateUpdate(plan.digest, shapes, delta, entry)
        FinishedUpdates(setup.config.data_dir / "updates").put(update, data_until_s=0.0)
    return OpenRound(plan, sealing, shapes)


def combined_on(grid: Grid, current: OpenRound, world: World) -> Aggregate:
    witness = Witness(world.folder / "aggregator" / "witness.json")
    outcome = combine(current, FlowerSites.connect(grid, world.federation), world.federation, witness)
    assert isinstance(outcome, Aggregate), outcome
    assert outcome.participants == ("site-1", "site-2", "site-3")
    return outcome


def local(current: OpenRound, world: World, *, workers: int) -> bytes:
    grid = LocalGrid(make_simulated_client_app(world.setups), 3, workers=workers)
    try:
        return combined_on(grid, current, world).delta_D.tobytes()
    finally:
        grid.close()


def test_the_order_of_work_does_not_change_a_byte(world: World) -> None:
    current = with_stored_updates(world)
    assert local(current, world, workers=1) == local(current, world, workers=3)


@pytest.mark.slow
def test_ray_and_the_local_grid_give_the_same_bytes(world: World) -> None:
    current = with_stored_updates(world)
    found: list[bytes] = []
    run_on_ray(
        make_simulated_client_app(world.setups),
        3,
        lambda grid: found.append(combined_on(grid, current, world).delta_D.tobytes()),
        cpus=2,
    )
    assert found == [local(current, world, workers=2)]


@pytest.mark.slow
def test_an_error_in_the_main_job_comes_out_of_ray(world: World) -> None:
    def failing(grid: Grid) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_ray(make_simulated_client_app(world.setups), 3, failing, cpus=2)


def test_neither_side_sees_the_others_objects(world: World) -> None:
    grid = LocalGrid(make_simulated_client_app(world.setups), 3, workers=1)
    request = {"request": ConfigRecord({"nonce": b"n"})}
    message = Message(RecordDict(request), next(iter(grid.get_node_ids())), "query.identify")
    (reply,) = grid.send_and_receive([message], timeout=60)
    grid.close()
    assert reply.content["reply"]["site"] == "site-1"
    assert dict(message.content["request"]) == {"nonce": b"n"}
