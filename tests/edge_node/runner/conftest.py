"""One node for all tests of the runner: it records what somebody says something about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from common.inference.model_folder import ModelFolder
from deploy.founding import build_world
from deploy.settings import SimulationSettings
from deploy.world import Silent
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.config import EngineSettings
from edge_node.node import EdgeNode
from tests.edge_node.loopback import opened, served


@dataclass(frozen=True)
class Served:
    """A node and where it answers."""

    node: EdgeNode
    url: str

    def record(self, response_id: str) -> Trajectory | None:
        return self.node.store.find([response_id]).get(response_id, [None])[0]

    def reward(self, response_id: str) -> float | None:
        """What feedback gave an answer; None where it was not recorded, or not rewarded."""
        found = self.record(response_id)
        given = [r.value for r in found.rewards if r.source == "feedback"] if found is not None else []
        return given[0] if given else None


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, model: ModelFolder) -> Iterator[Served]:
    settings = SimulationSettings(sites=3, rounds=2, attack="none", min_samples=0)
    world = build_world(settings, model, tmp_path_factory.mktemp("runner"), Silent())
    engine = EngineSettings(context_tokens=2048, threads=1)  # what an agent says before it comes to the point
    with opened(world, selection="feedback", engine=engine) as node, served(node.app) as url:
        yield Served(node, url)
    world.hub.close()
