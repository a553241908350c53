"""Which modes of aggregation a node's own policy lets its updates go into: asked before it trains, and again after."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aggregator.combine import OpenRound
from aggregator.secure_round import round_terms
from common.errors import PrivacyError, TrustError
from common.inference.model_folder import ModelFolder
from common.plan import RoundPlan
from common.secagg import ServerSession, Terms
from common.secagg.encoding import encode
from common.secagg.messages import Ready
from common.update import PrivateUpdate
from deploy.founding import build_world
from deploy.settings import SimulationSettings
from deploy.world import Silent, World
from edge_node.node import EdgeNode
from edge_node.training.site_training import SiteTraining
from tests.edge_node.training.test_trainer import plan_of, signed


@pytest.fixture
def world(tmp_path: Path, model: ModelFolder) -> Iterator[World]:
    """Sites whose policies accept sums, and neither sketches nor sealed updates."""
    settings = SimulationSettings(sites=3, rounds=2, attack="none", min_samples=0, aggregation="secagg")
    world = build_world(settings, model, tmp_path, Silent())
    yield world
    world.hub.close()


class TrainedError(Exception):
    """Nothing held the node back."""


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plans that the node went on to train for."""
    digests: list[str] = []

    def update_for(training: SiteTraining, plan: RoundPlan, *_: Any) -> PrivateUpdate:
        digests.append(plan.digest)
        raise TrainedError

    monkeypatch.setattr(SiteTraining, "update_for", update_for)
    return digests


def terms_of(world: World) -> Terms:
    plan, start = plan_of(world), world.hub.adapter("v0")
    shapes = {name: start.tensors[name].shape for name in start.names(plan.lora_phase)}
    return round_terms(cast(OpenRound, SimpleNamespace(plan=plan, shapes=shapes)), world.federation)


def answer(
    node: EdgeNode, world: World, mode: str, *, request: bytes | None = None, beside: bool = False
) -> bytes | None:
    """To a request, or to the question whether the update is there."""
    request = encode(Ready(terms_of(world))) if request is None else request
    return node.secure_answer(*signed(world, plan_of(world)), "", mode=mode, request=request, train_beside=beside)


def set_mode(world: World, mode: str) -> None:
    policy = world.setups[0].config.policy
    before = policy.read_text()
    assert 'aggregation = ["secagg"]' in before
    policy.write_text(before.replace('aggregation = ["secagg"]', f'aggregation = ["{mode}"]'))


def test_a_node_whose_policy_only_lets_it_sum_refuses_any_other_mode_before_it_trains(
    world: World, node: EdgeNode, trained: list[str]
) -> None:
    for mode, beside in product(("secagg_sketch", "sealed", "clear", ""), (False, True)):
        with pytest.raises(PrivacyError, match=f"does not allow uploading updates in mode '{mode}'") as refused:
            answer(node, world, mode, beside=beside)
        assert refused.value.public == "the site's policy does not allow uploads in this mode"
    for hand_over in (node.hand_over, node.sealed_update):
        with pytest.raises(PrivacyError, match="in mode 'sealed'"):
            hand_over(*signed(world, plan_of(world)), "")
    data = world.setups[0].config.data_dir
    assert trained == [] and node.training.ledger.charges() == []
    assert list((data / "updates").iterdir()) == [] and not (data / "secure").exists()
    assert not (data / "held-plan.json").exists()


def test_in_the_mode_it_names_it_trains(world: World, node: EdgeNode, trained: list[str]) -> None:
    with pytest.raises(TrainedError):
        answer(node, world, "secagg")
    assert trained == [plan_of(world).digest]


def test_a_policy_that_forbids_the_mode_while_the_node_trains_holds_the_update_back(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden_meanwhile(training: SiteTraining, plan: RoundPlan, *_: Any) -> PrivateUpdate:
        set_mode(world, "sealed")
        return PrivateUpdate(plan.digest, {"x": (3,)}, np.zeros(3, np.float32), "e" * 64)

    monkeypatch.setattr(SiteTraining, "update_for", forbidden_meanwhile)
    with pytest.raises(PrivacyError, match="in mode 'secagg'"):
        answer(node, world, "secagg")
    assert not (world.setups[0].config.data_dir / "secure").exists()


def test_nor_does_it_go_on_with_a_session_that_the_policy_has_meanwhile_forbidden(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, start = plan_of(world), world.hub.adapter("v0")
    shapes = {name: start.tensors[name].shape for name in start.names(plan.lora_phase)}
    delta_D = np.zeros(sum(map(math.prod, shapes.values())), np.float32)
    update = PrivateUpdate(plan.digest, shapes, delta_D, "e" * 64)
    node.training.updates.put(update, data_until_s=0.0)
    monkeypatch.setattr(SiteTraining, "update_for", lambda *_: update)
    terms = terms_of(world)
    server = ServerSession(terms, key=world.federation.key, session=bytes(32), present=terms.names)
    offer = server.start()[node.name]
    reply = answer(node, world, "secagg", request=offer)
    assert reply and answer(node, world, "secagg", request=offer) == reply
    set_mode(world, "sealed")
    with pytest.raises(PrivacyError, match="in mode 'secagg'"):
        answer(node, world, "secagg", request=offer)


@pytest.mark.parametrize("request_", [b"", b"garbage", "offer"])
def test_a_node_that_was_not_asked_whether_it_is_ready_trains_for_no_session(
    request_: bytes | str, world: World, node: EdgeNode, trained: list[str]
) -> None:
    terms = terms_of(world)
    server = ServerSession(terms, key=world.federation.key, session=bytes(32), present=terms.names)
    request = server.start()[node.name] if isinstance(request_, str) else request_
    with pytest.raises(TrustError, match=r"before this site was asked|not an encoded record"):
        answer(node, world, "secagg", request=request)
    assert trained == [] and node.training.ledger.charges() == []
