"""The server's optimizers against Flower's own, fed the same updates over several rounds."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

from aggregator.rules.mean import weighted_mean
from aggregator.server_optimizer import Moments, ServerOptimizer, step
from tests.parity.test_flower import replies_of

ROUNDS, SITES, PARAMETERS = 4, 5, 1000


def theirs(strategy: FedAvg, start: np.ndarray, updates_RND: np.ndarray) -> list[np.ndarray]:
    """The model after each round, as Flower's loop would move it."""
    current, models = start, []
    for number, updates in enumerate(updates_RND, start=1):
        layers = {"0": current[:400].reshape(20, 20), "1": current[400:]}
        arrays = ArrayRecord({name: Array(layer) for name, layer in layers.items()})
        if isinstance(strategy, FedAvgM):
            strategy.current_arrays = arrays
        else:
            strategy.current_arrays = layers  # type: ignore[attr-defined]
        aggregated, _ = strategy.aggregate_train(number, replies_of(current + updates, np.ones(SITES)))
        assert aggregated is not None
        current = np.concatenate([layer.reshape(-1) for layer in aggregated.to_numpy_ndarrays()]).astype(np.float32)
        models.append(current)
    return models


def ours(optimizer: ServerOptimizer, start: np.ndarray, updates_RND: np.ndarray) -> list[np.ndarray]:
    current, moments, models = start, Moments.none(optimizer, PARAMETERS), []
    for updates in updates_RND:
        made, moments = step(optimizer, moments, weighted_mean(updates, np.ones(SITES)), longest=1e9)
        current = current + made
        models.append(current)
    return models


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    [
        (
            ServerOptimizer("fedavgm", learning_rate=0.7, beta_1=0.8),
            lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.8),
        ),
        (ServerOptimizer("fedavgm", learning_rate=0.5, beta_1=0.0), lambda: FedAvgM(server_learning_rate=0.5)),
        (ServerOptimizer("fedadam", learning_rate=0.1), lambda: FedAdam(eta=0.1)),
        (
            ServerOptimizer("fedadam", learning_rate=0.02, beta_1=0.5, beta_2=0.9, tau=1e-2),
            lambda: FedAdam(eta=0.02, beta_1=0.5, beta_2=0.9, tau=1e-2),
        ),
        (ServerOptimizer(), FedAvg),
    ],
)
def test_four_rounds_end_where_flowers_do(optimizer: ServerOptimizer, strategy: type[FedAvg]) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=PARAMETERS).astype(np.float32)
    updates_RND = (0.1 * rng.normal(size=(ROUNDS, SITES, PARAMETERS))).astype(np.float32)
    for mine, flowers in zip(ours(optimizer, start, updates_RND), theirs(strategy(), start, updates_RND), strict=True):
        np.testing.assert_allclose(mine, flowers, rtol=0, atol=1e-5)  # Flower subtracts whole weights
