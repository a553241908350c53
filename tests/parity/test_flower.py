"""Rules against Flower's own strategies, fed the same updates."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from flwr.supercore.task_identity import TaskIdentity

from aggregator.rules import RULES
from aggregator.rules.mean import weighted_mean
from aggregator.rules.median import coordinate_median
from aggregator.rules.trimmed_mean import trimmed_mean


def replies_of(updates: np.ndarray, weights: np.ndarray) -> list[Message]:
    """Each update as the reply of a Flower node, in two arrays."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    replies = []
    for update, weight in zip(updates, weights, strict=True):
        question = Message(RecordDict(), dst_node_id=1, message_type="train")
        layers = [update[:400].reshape(20, 20), update[400:]]
        content = {"arrays": ArrayRecord(layers), "metrics": MetricRecord({"num-examples": int(weight)})}
        replies.append(Message(RecordDict(content), reply_to=question))
    return replies


def theirs(strategy: FedAvg, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    arrays, _ = strategy.aggregate_train(1, replies_of(updates, weights))
    assert arrays is not None
    return np.concatenate([layer.reshape(-1) for layer in arrays.to_numpy_ndarrays()])


def drawn(sites: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(sites, 1000)).astype(np.float32)


def test_the_mean_is_flowers_fedavg() -> None:
    weights = np.array([1, 2, 4, 1, 2])
    np.testing.assert_allclose(weighted_mean(drawn(5), weights), theirs(FedAvg(), drawn(5), weights), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sites", [5, 8])
def test_the_median_is_flowers_fedmedian(sites: int) -> None:
    expected = theirs(FedMedian(), drawn(sites), np.ones(sites))
    np.testing.assert_allclose(coordinate_median(drawn(sites)), expected, rtol=0, atol=1e-6)


def test_the_trimmed_mean_is_flowers_fedtrimmedavg() -> None:
    expected = theirs(FedTrimmedAvg(beta=0.2), drawn(10), np.ones(10))
    np.testing.assert_allclose(trimmed_mean(drawn(10), trim=2), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("sites", "liars"), [(7, 1), (9, 2), (20, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_krum_and_multi_krum_are_flowers(sites: int, liars: int, seed: int) -> None:
    updates = drawn(sites, seed)
    updates[-liars:] *= -3
    weights = np.array([1, 2] * sites)[:sites]
    one = theirs(Krum(num_malicious_nodes=liars), updates, weights)
    np.testing.assert_array_equal(RULES["krum"].combine(updates, weights, liars), one)
    several = theirs(MultiKrum(num_malicious_nodes=liars, num_nodes_to_select=sites - liars), updates, weights)
    decision = RULES["multi-krum"].decide(updates, weights, liars)
    if np.array(weights)[list(decision.kept)].max() / weights[list(decision.kept)].sum() <= 0.25:
        np.testing.assert_allclose(decision.delta_D, several, rtol=0, atol=1e-6)
    else:  # Flower caps no weight
        np.testing.assert_allclose(
            weighted_mean(updates[list(decision.kept)], weights[list(decision.kept)]), several, rtol=0, atol=1e-6
        )
