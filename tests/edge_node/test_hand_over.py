"""Handing over without waiting: training runs beside the messages, once, and is charged once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from common.errors import PrivacyError, TransportError, TrustError
from common.plan import RoundPlan
from common.update import SealedUpdate, open_update
from deploy.world import World
from edge_node.node import EdgeNode
from edge_node.training import site_training
from tests.edge_node.training.test_trainer import SEALING, plan_of, signed


class Gate:
    """Training waits here until it is opened; counts how often it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.begun, self.fails_with = threading.Event(), 0, None  # type: ignore[var-annotated]
        real = site_training.train_privately

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.begun += 1
            assert self.open.wait(60)
            if self.fails_with is not None:
                raise self.fails_with
            return real(*args, **kwargs)

        monkeypatch.setattr(site_training, "train_privately", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def asked_until(ask: Callable[[], SealedUpdate | None]) -> SealedUpdate:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        sealed = ask()
        if sealed is not None:
            return sealed
        time.sleep(0.02)
    pytest.fail("it never finished")


def opened(world: World, node: EdgeNode, sealed: SealedUpdate, plan: RoundPlan) -> np.ndarray:
    start = world.hub.adapter("v0")
    shapes = {name: start.tensors[name].shape for name in start.names(plan.lora_phase)}
    return open_update(sealed, plan, shapes, site_public=node.key.public, key=SEALING)


def test_the_answer_is_not_yet_until_it_is_the_update(world: World, node: EdgeNode, gate: Gate) -> None:
    plan = plan_of(world)
    for _ in range(3):
        assert node.hand_over(*signed(world, plan), "") is None
    gate.open.set()
    sealed = asked_until(lambda: node.hand_over(*signed(world, plan), ""))
    again = node.hand_over(*signed(world, plan), "")
    assert again is not None
    np.testing.assert_array_equal(opened(world, node, sealed, plan), opened(world, node, again, plan))
    assert gate.begun == 1
    assert len(node.training.ledger.charges()) == 1


def test_one_plan_is_trained_at_a_time_and_a_late_one_is_not_lost(world: World, node: EdgeNode, gate: Gate) -> None:
    first, second = plan_of(world, 1), plan_of(world, 2)
    assert node.hand_over(*signed(world, first), "") is None
    ends = time.monotonic() + 60
    while not gate.begun and time.monotonic() < ends:
        time.sleep(0.01)
    assert node.hand_over(*signed(world, second), "") is None  # the next round has begun
    assert gate.begun == 1
    gate.open.set()
    sealed = asked_until(lambda: node.hand_over(*signed(world, second), "", [signed(world, first)]))
    assert sealed.plan_digest == first.digest  # what is finished is handed over, damped there, and not trained again
    assert gate.begun == 1
    assert len(node.training.ledger.charges()) == 1
    sealed = asked_until(lambda: node.hand_over(*signed(world, second), ""))  # not taken any more: a new one
    assert sealed.plan_digest == second.digest
    assert len(node.training.ledger.charges()) == 2


def test_what_training_raises_is_said_once_and_then_tried_again(world: World, node: EdgeNode, gate: Gate) -> None:
    plan = plan_of(world)
    gate.fails_with = TransportError("disk full")
    gate.open.set()
    with pytest.raises(TransportError, match="disk full"):
        asked_until(lambda: node.hand_over(*signed(world, plan), ""))
    gate.fails_with = None
    sealed = asked_until(lambda: node.hand_over(*signed(world, plan), ""))
    assert sealed.plan_digest == plan.digest
    assert len(node.training.ledger.charges()) == 1


def test_what_may_not_be_trained_is_refused_at_once(world: World, node: EdgeNode, gate: Gate) -> None:
    plan = plan_of(world)
    payload, signature = signed(world, plan)
    with pytest.raises(TrustError, match="does not verify"):
        node.hand_over(payload, b"x" * 64, "")
    late = dataclasses.replace(plan, deadline_s=world.clock() - 1)
    with pytest.raises(TrustError, match="deadline has passed"):
        node.hand_over(*signed(world, late), "")
    policy = world.setups[0].config.policy
    policy.write_text(policy.read_text().replace("updates = true", "updates = false"))
    with pytest.raises(PrivacyError, match="does not allow uploading"):
        node.hand_over(payload, signature, "")
    assert gate.begun == 0
    assert node.training.ledger.charges() == []


def test_an_earlier_plan_that_the_aggregator_did_not_sign_is_refused(world: World, node: EdgeNode) -> None:
    plan = plan_of(world)
    node.sealed_update(*signed(world, plan), "")
    with pytest.raises(TrustError, match="does not verify"):
        node.hand_over(*signed(world, plan_of(world, 2)), "", [(plan.payload, b"x" * 64)])
    assert len(node.training.ledger.charges()) == 1


def test_the_answer_does_not_wait_for_training_even_where_an_earlier_update_is_stored(
    world: World, node: EdgeNode, gate: Gate
) -> None:
    gate.open.set()
    first, second = plan_of(world, 1), plan_of(world, 2)
    node.sealed_update(*signed(world, first), "")
    gate.open.clear()
    assert node.hand_over(*signed(world, second), "") is None
    ends = time.monotonic() + 60
    while gate.begun < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    answers: list[SealedUpdate | None] = []
    asking = threading.Thread(
        target=lambda: answers.append(node.hand_over(*signed(world, second), "", [signed(world, first)])), daemon=True
    )
    asking.start()
    asking.join(10)
    answered_meanwhile = list(answers)
    gate.open.set()
    assert answered_meanwhile == [None]
