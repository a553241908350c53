"""Shared pieces of real things: the embedded model, an engine, adapters that change it."""

from __future__ import annotations

import os

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import deploy  # noqa: F401 - switches off telemetry before libraries load
from common.adapter import Adapter, LoraShape, initial_adapter
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine
from common.inference.model_folder import EMBEDDED, TARGET_MODULES, ModelFolder, open_model

torch.set_num_threads(1)
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")  # how fast a machine draws examples says nothing about the code


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole default runs take minutes: they begin first, so that no worker waits for the other at the end."""
    items.sort(key=lambda item: "test_default_run" not in item.nodeid)


SHAPE = LoraShape(8, 16.0, TARGET_MODULES)


@pytest.fixture(scope="session")
def model() -> ModelFolder:
    return open_model(EMBEDDED)


@pytest.fixture(scope="session")
def tokenizer(model: ModelFolder) -> ChatTokenizer:
    return ChatTokenizer(model)


@pytest.fixture(scope="session")
def start(model: ModelFolder) -> Adapter:
    """The initial adapter: B is zero, so it changes nothing."""
    return initial_adapter(model.module_shapes(), SHAPE, seed=0)


def changed(adapter: Adapter, *, seed: int, scale: float = 0.05) -> Adapter:
    """An adapter whose B factors are random: it changes every layer."""
    rng = np.random.default_rng(seed)
    return Adapter(
        adapter.shape,
        {n: rng.normal(0, scale, t.shape) if "lora_B" in n else t for n, t in adapter.tensors.items()},
    )


@pytest.fixture(scope="session")
def engine(model: ModelFolder) -> Iterator[Engine]:
    yield Engine(model, slots=8, context_tokens=96, threads=1)
