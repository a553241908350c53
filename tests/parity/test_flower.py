"""The weighted mean against Flower's own FedAvg."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from aggregator.rules.mean import weighted_mean


def test_the_mean_is_flowers_fedavg() -> None:
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(5, 1000)).astype(np.float32)
    weights = np.array([1, 2, 4, 1, 2])
    replies = []
    for update, weight in zip(updates, weights, strict=True):
        question = Message(RecordDict(), dst_node_id=1, message_type="train")
        content = {"arrays": ArrayRecord([update]), "metrics": MetricRecord({"num-examples": int(weight)})}
        replies.append(Message(RecordDict(content), reply_to=question))
    theirs, _ = FedAvg().aggregate_train(1, replies)
    assert theirs is not None
    np.testing.assert_allclose(weighted_mean(updates, weights), theirs.to_numpy_ndarrays()[0], atol=1e-6)
