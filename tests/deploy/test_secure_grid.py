"""Real nodes with stored updates in a secure round, over the in-process grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.combine import OpenRound
from aggregator.flower_sites import FlowerSites
from aggregator.plan import make_plan
from aggregator.secure_round import combine_securely, round_terms
from aggregator.server_app import phase_shapes
from aggregator.witness import Witness
from common.errors import ConfigError, PrivacyError, TrustError
from common.identity import SealingKey
from common.inference.model_folder import ModelFolder
from common.plan import sign_plan
from common.secagg import SKETCH
from common.secagg.encoding import encode
from common.secagg.messages import Ready
from common.secagg.ring import Ring
from common.update import Aggregate, Voided
from deploy.founding import build_world
from deploy.local_grid import LocalGrid
from deploy.settings import SimulationSettings
from deploy.simulated_site import make_simulated_client_app, open_site
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


@pytest.mark.parametrize("spoilt", ["limits", "roster", "share"])
def test_a_site_that_no_round_would_sum_trains_nothing_and_pays_nothing(
    spoilt: str, tmp_path: Path, model: ModelFolder
) -> None:
    world = build_world(SimulationSettings(sites=5, aggregation="secagg_sketch"), model, tmp_path, Silent())
    try:
        federation, start = world.federation, world.hub.adapter("v0")
        key = SealingKey(X25519PrivateKey.generate())
        plan = make_plan(federation, world.hub.stable, start, number=1, sealing_key=key, now_s=world.clock())
        current = OpenRound(plan, key, phase_shapes(start, plan.lora_phase))
        site = open_site(world.setups[0]).node
        if spoilt == "limits":
            federation = replace(federation, limits=replace(federation.limits, left_out=4))
            reason = "limits is not the one this site derives"
        else:
            policy = world.setups[0].config.policy
            law = policy.read_text()
            share, other = law.partition("sketched_share = ")[2].splitlines()[0], world.federation.roster["site-2"]
            law = law.replace(f"sketched_share = {share}", "sketched_share = 0.001") if spoilt == "share" else law
            law = law.replace(other.hex(), "ab" * 32) if spoilt == "roster" else law
            policy.write_text(law)
            reason = {"share": "limits is not", "roster": "another roster than this site approved"}[spoilt]
        terms = round_terms(current, federation)
        with pytest.raises((TrustError, PrivacyError), match=reason):
            site.secure_answer(
                plan.payload,
                sign_plan(plan, federation.key),
                "",
                mode=SKETCH,
                request=encode(Ready(terms)),
                train_beside=False,
            )
        assert not site.training.ledger.charges()
        assert site.training.updates.get(plan.digest) is None
    finally:
        world.close()


def test_settings_that_cannot_work_are_refused(model: ModelFolder) -> None:
    with pytest.raises((ValueError, ConfigError), match="needs at least 4 sites"):
        SimulationSettings(sites=3, attack="none", aggregation="secagg_sketch")
    with pytest.raises((ValueError, ConfigError), match="grid = local"):
        SimulationSettings(sites=3, attack="none", aggregation="secagg", grid="ray")
    for mode, sites in (("sealed", 4), ("secagg_sketch", 4), ("secagg", 257)):
        with pytest.raises((ValueError, ConfigError), match="words of 16 bits carry"):
            SimulationSettings(sites=sites, attack="none", aggregation=mode, word_bits=16)  # type: ignore[arg-type]
