"""A hub for each test, on a tiny adapter: rounds are about messages, not about tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.adapter import Adapter, LoraShape, initial_adapter
from model_hub.hub import Hub
from tests.aggregator.stub import new_hub


@pytest.fixture(scope="session")
def start() -> Adapter:
    shapes = {f"model.layers.{layer}.self_attn.{name}": (6, 5) for layer in range(2) for name in ("q_proj", "v_proj")}
    return initial_adapter(shapes, LoraShape(2, 4.0, ("q_proj", "v_proj")), seed=0)


@pytest.fixture
def hub(tmp_path: Path, start: Adapter) -> Iterator[Hub]:
    hub = new_hub(tmp_path / "hub", start)
    yield hub
    hub.close()
