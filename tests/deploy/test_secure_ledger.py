"""What real nodes pay for a round in a secure mode: once, whatever becomes of the aggregator that asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from aggregator.flower_sites import FlowerSites
from aggregator.round_log import RoundLog
from aggregator.secure_round import _Asking, combine_securely
from aggregator.server_app import begin_round, open_round
from aggregator.witness import Witness
from common.inference.model_folder import ModelFolder
from common.secagg.encoding import decode
from common.secagg.messages import Signed
from common.update import Aggregate, Voided
from deploy.founding import build_world
from deploy.local_grid import LocalGrid
from deploy.settings import SimulationSettings
from deploy.simulated_site import make_simulated_client_app, open_site
from deploy.world import Silent, World
from edge_node.training import site_training
from edge_node.training.trainer import TRAINING


def paid(world: World) -> list[list[tuple[str, str]]]:
    """Every charge in each site's ledger: what for, and in which round."""
    ledgers = [open_site(setup).node.training.ledger for setup in world.setups]
    return [[(charge.purpose, charge.round.rpartition("/")[2]) for charge in ledger.charges()] for ledger in ledgers]


class Failed(Exception):
    """The aggregator's disk, say."""


@pytest.mark.slow
def test_sites_that_train_pay_once_for_a_round_whatever_becomes_of_the_aggregator(
    tmp_path: Path, model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has asked anything: each trains on no records, which costs the same. What a site measures first is not tested."""
    monkeypatch.setattr(site_training, "self_test", lambda *_, **__: [])
    monkeypatch.setattr(site_training, "seconds_per_unit", lambda *_, **__: 0.001)
    settings = SimulationSettings(sites=3, attack="none", aggregation="secagg", rounds=3, min_samples=0)
    world = build_world(settings, model, tmp_path, Silent())
    grid = LocalGrid(make_simulated_client_app(world.setups), 3, workers=1)
    log = RoundLog(tmp_path / "aggregator")
    ask = _Asking.__call__

    def fails(self: _Asking, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        if decode(Signed, next(iter(requests.values()))).kind == "Uploads":
            raise Failed
        return ask(self, requests)

    def combined() -> Aggregate | Voided:
        """As an aggregator that was just started does it."""
        current = open_round(world.federation, world.hub, log, now_s=world.clock(), report=lambda status: None)
        witness = Witness(tmp_path / "aggregator" / "witness.json")
        return combine_securely(current, FlowerSites.connect(grid, world.federation), world.federation, witness)

    try:
        begin_round(world.federation, world.hub, log, now_s=world.clock())
        assert paid(world) == [[]] * 3
        with monkeypatch.context() as patch, pytest.raises(Failed):
            patch.setattr(_Asking, "__call__", fails)
            combined()
        assert paid(world) == [[(TRAINING, "1")]] * 3
        outcome = combined()
        assert isinstance(outcome, Aggregate) and outcome.participants == ("site-1", "site-2", "site-3"), outcome
        assert isinstance(combined(), Voided)
        assert paid(world) == [[(TRAINING, "1")]] * 3

        log.void(1, "the test goes on", ())
        begin_round(world.federation, world.hub, log, now_s=world.clock())
        assert isinstance(combined(), Aggregate)
        assert paid(world) == [[(TRAINING, "1"), (TRAINING, "2")]] * 3
    finally:
        log.close()
        grid.close()
