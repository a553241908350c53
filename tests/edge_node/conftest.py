"""A federation of three sites on disk, of which tests open the nodes they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.inference.model_folder import ModelFolder
from deploy.founding import build_world
from deploy.settings import SimulationSettings
from deploy.world import Silent, World
from edge_node.node import EdgeNode


@pytest.fixture
def world(tmp_path: Path, model: ModelFolder) -> Iterator[World]:
    settings = SimulationSettings(sites=3, rounds=2, attack="none", min_samples=0)
    world = build_world(settings, model, tmp_path, Silent())
    yield world
    world.hub.close()


@pytest.fixture
def node(world: World) -> Iterator[EdgeNode]:
    """Site 1's node, with the initial version adopted."""
    node = EdgeNode(world.setups[0].config, clock=world.clock)
    node.look_again()
    yield node
    node.close()
