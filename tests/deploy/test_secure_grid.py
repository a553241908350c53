"""Real nodes with stored updates in a secure round, over the in-process grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aggregator.combine import OpenRound
from aggregator.flower_sites import FlowerSites
from aggregator.secure_round import combine_securely, round_terms
from aggregator.witness import Witness
from common.errors import ConfigError
from common.inference.model_folder import ModelFolder
from common.secagg.ring import Ring
from common.update import Aggregate, Voided
from deploy.founding import build_world
from deploy.local_grid import LocalGrid
from deploy.settings import SimulationSettings
from deploy.simulated_site import make_simulated_client_app
from deploy.world import Silent, World
from edge_node.training.finished_updates import FinishedUpdates
from tests.deploy.test_grids import with_stored_updates


def current_ring(world: World, current: OpenRound) -> Ring:
    return round_terms(current, world.federation).ring


@pytest.mark.parametrize(
    ("mode", "sites", "bits"),
    [("secagg", 3, 32), ("secagg", 3, 16), pytest.param("secagg_sketch", 5, 32, marks=pytest.mark.slow)],
)
def test_real_nodes_give_the_mean_once(mode: str, sites: int, bits: int, tmp_path: Path, model: ModelFolder) -> None:
    settings = SimulationSettings(sites=sites, attack="none", aggregation=mode, word_bits=bits)  # type: ignore[arg-type]
    world = build_world(settings, model, tmp_path, Silent())
    grid = LocalGrid(make_simulated_client_app(world.setups), sites, workers=1)
    try:
        current = with_stored_updates(world)
        found = {
            setup.config.name: FinishedUpdates(setup.config.data_dir / "updates").get(current.plan.digest)
            for setup in world.setups
        }
        witness = Witness(world.folder / "aggregator" / "witness.json")
        connected = FlowerSites.connect(grid, world.federation)
        outcome = combine_securely(current, connected, world.federation, witness)
        assert isinstance(outcome, Aggregate), outcome
        mean_D = np.mean([found[name].delta_D for name in outcome.participants], axis=0, dtype=np.float64)  # type: ignore[union-attr]
        if bits == 32:  # a step of the ring, and float32
            step = 1 / current_ring(world, current).scale
            assert np.abs(outcome.delta_D - mean_D).max() < step + 1e-6 * np.abs(mean_D).max()
        else:  # the square root of so many sites' rounding, as docs/leakage.md has it, and chance
            assert np.linalg.norm(outcome.delta_D - mean_D) < 1.2 * 1.3e-4 * np.sqrt(sites) * settings.clip_norm
        again = combine_securely(current, connected, world.federation, witness)
        assert isinstance(again, Voided) and "0 updates can be summed" in again.reason
    finally:
        grid.close()
        world.close()


def test_settings_that_cannot_work_are_refused(model: ModelFolder) -> None:
    with pytest.raises((ValueError, ConfigError), match="needs at least 4 sites"):
        SimulationSettings(sites=3, attack="none", aggregation="secagg_sketch")
    with pytest.raises((ValueError, ConfigError), match="grid = local"):
        SimulationSettings(sites=3, attack="none", aggregation="secagg", grid="ray")
    for mode, sites in (("sealed", 4), ("secagg_sketch", 4), ("secagg", 257)):
        with pytest.raises((ValueError, ConfigError), match="words of 16 bits carry"):
            SimulationSettings(sites=sites, attack="none", aggregation=mode, word_bits=16)  # type: ignore[arg-type]
