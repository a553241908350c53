"""A whole round of private training on one node's data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.plan import make_plan
from common.accounting import PrivateSteps
from common.errors import PrivacyError, TrustError
from common.identity import SealingKey
from common.plan import RoundPlan, sign_plan
from common.tasks import math as task
from common.update import open_update
from deploy.drills import crashing
from deploy.users import ask_all
from deploy.world import World
from edge_node.node import EdgeNode
from edge_node.training import trainer
from edge_node.training.unit_gradients import UnitGradients
from model_hub.version import Lineage
from tests.edge_node.training.test_unit_gradients import random_pairs

SEALING = SealingKey(X25519PrivateKey.generate())


def plan_of(world: World, number: int = 1) -> RoundPlan:
    return make_plan(
        world.federation,
        world.hub.stable,
        world.hub.adapter("v0"),
        number=number,
        sealing_key=SEALING,
        now_s=world.clock(),
    )


def signed(world: World, plan: RoundPlan) -> tuple[bytes, bytes]:
    return plan.payload, sign_plan(plan, world.federation.key)


def opened(world: World, node: EdgeNode, plan: RoundPlan) -> np.ndarray:
    start = world.hub.adapter("v0")
    return open_update(
        node.sealed_update(*signed(world, plan)),
        plan,
        {name: start.tensors[name].shape for name in start.names(plan.lora_phase)},
        site_public=node.key.public,
        key=SEALING,
    )


@pytest.fixture
def with_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_node.node.preference_pairs", lambda trajectories: random_pairs(12, seed=1))


@pytest.mark.usefixtures("with_pairs")
def test_a_round_is_charged_before_the_first_step_and_sent_again_without_new_noise(
    world: World, node: EdgeNode
) -> None:
    plan = plan_of(world)
    first = opened(world, node, plan)
    charges = node.ledger.charges()
    assert [c.plan_digest for c in charges] == [plan.digest]
    training = plan.training
    assert charges[0].event == PrivateSteps(
        trainer.planned_noise(plan, node.policy.law()), training.sampling_rate, training.steps
    )
    np.testing.assert_array_equal(opened(world, node, plan), first)
    assert node.ledger.charges() == charges
    assert np.linalg.norm(first.astype(np.float64)) <= plan.clip_norm * (1 + 1e-6)


@pytest.mark.usefixtures("with_pairs")
def test_all_planned_rounds_fit_the_budget_and_one_more_does_not(world: World, node: EdgeNode) -> None:
    law = node.policy.law().privacy
    for number in (1, 2):
        opened(world, node, plan_of(world, number))
    assert law.epsilon_total * 0.95 < node.ledger.epsilon_spent(law.delta) <= law.epsilon_total
    again = dataclasses.replace(plan_of(world, 2), planned_rounds=3, round=3)
    with pytest.raises(PrivacyError, match="is left") as error:
        node.sealed_update(*signed(world, again))
    assert error.value.public == "the site's privacy budget does not hold another round"


@pytest.mark.usefixtures("with_pairs")
def test_a_crash_in_training_stays_spent_and_is_not_repeated(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(world)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_run_steps", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            node.sealed_update(*signed(world, plan))
    world.clock.set(world.clock() + 60)  # another plan for the same round does not help
    assert len(node.ledger.charges()) == 1
    for later in (plan, plan_of(world)):
        with pytest.raises(PrivacyError, match="charged before"):
            node.sealed_update(*signed(world, later))


def test_the_noise_of_an_update_is_what_was_charged(world: World, node: EdgeNode) -> None:
    """Without data the update is -lr · (σ·C / expected batch) · noise, once per step; nothing else explains its size."""
    training = dataclasses.replace(world.federation.training, learning_rate=1.0)
    plan = dataclasses.replace(plan_of(world), training=training, clip_norm=1e6)
    update = opened(world, node, plan).astype(np.float64)
    sigma = node.ledger.charges()[0].event.noise_multiplier
    expected = np.sqrt(training.steps) * sigma * training.unit_clip_norm / training.expected_batch
    assert abs(update.std() / expected - 1) < 0.02


def test_batches_are_drawn_at_the_charged_rate_and_divided_by_a_constant(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal pairs, clipped, without noise: the update's length is lr · C · (pairs drawn) / expected batch."""
    pair = random_pairs(1, seed=1)[0]
    count = 40
    training = dataclasses.replace(
        world.federation.training,
        steps=1,
        sampling_rate=0.3,
        unit_clip_norm=1e-6,
        learning_rate=1.0,
        expected_batch=7.0,
    )
    monkeypatch.setattr("edge_node.node.preference_pairs", lambda trajectories: [pair] * count)
    node = EdgeNode(world.setups[0].config, clock=world.clock, unsafe_no_noise=True)
    node.look_again()
    drawn = []
    for second in range(25):
        world.clock.set(world.clock() + 1)
        plan = dataclasses.replace(plan_of(world), training=training, deadline_s=world.clock() + 1000 + second)
        length = np.linalg.norm(opened(world, node, plan).astype(np.float64))
        drawn.append(length * 7.0 / 1e-6)
    node.close()
    np.testing.assert_allclose(drawn, np.rint(drawn), atol=0.02)  # whole pairs, over a constant
    assert len(set(np.rint(drawn))) > 3
    assert abs(np.mean(drawn) - 0.3 * count) < 4 * np.sqrt(0.3 * 0.7 * count / 25)


def test_a_ledger_without_the_charge_of_a_finished_update_trains_no_more(world: World, node: EdgeNode) -> None:
    """Both ledger files deleted: a fresh budget, were it not for the updates."""
    opened(world, node, plan_of(world))
    node.close()
    for file in world.setups[0].config.data_dir.glob("ledger.*"):
        file.unlink()
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    again.look_again()
    with pytest.raises(TrustError):
        again.sealed_update(*signed(world, plan_of(world, 2)))
    again.close()


def test_a_site_without_data_sends_noise_rather_than_say_so(world: World, node: EdgeNode) -> None:
    update = opened(world, node, plan_of(world))
    assert np.linalg.norm(update) > 0
    assert len(node.ledger.charges()) == 1


@pytest.mark.usefixtures("with_pairs")
def test_a_record_with_a_gradient_that_is_not_finite_tells_nobody(world: World, node: EdgeNode) -> None:
    """A version whose weights overflow must not make the reply depend on whether there are records."""
    bad = world.hub.submit(
        crashing(world.hub.adapter("v0")),
        lineage=Lineage(node.model.digest),
        largest_change=1.0,
        unsafe_skip_gates=True,
    )
    plan = dataclasses.replace(plan_of(world), adapter_version=bad.id, adapter_digest=bad.digest)
    update = node.sealed_update(*signed(world, plan))
    assert update.ledger_entry


def test_an_update_made_without_noise_is_not_sent_by_a_private_node(world: World) -> None:
    plan = plan_of(world)
    unsafe = EdgeNode(world.setups[0].config, clock=world.clock, unsafe_no_noise=True)
    unsafe.look_again()
    assert unsafe.sealed_update(*signed(world, plan)).ledger_entry == "unsafe-no-dp"
    unsafe.close()
    node = EdgeNode(world.setups[0].config, clock=world.clock)
    node.look_again()
    with pytest.raises(PrivacyError, match="without noise"):
        node.sealed_update(*signed(world, plan))
    node.close()


def test_an_altered_ledger_leaves_a_node_that_serves(world: World, node: EdgeNode) -> None:
    opened(world, node, plan_of(world))
    node.close()
    (world.setups[0].config.data_dir / "ledger.sqlite").write_bytes(b"broken")
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    again.look_again()
    problems = [task.Problem(23, "+", 45)]
    assert len(ask_all(again.app, problems, model="headwater", answers=1, seed=0)[0]) == 1
    with pytest.raises(TrustError) as error:
        again.sealed_update(*signed(world, plan_of(world, 2)))
    assert error.value.public == "this site's privacy ledger does not verify"
    again.close()


def test_records_are_trained_on_under_the_law_in_force_now(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("edge_node.node.preference_pairs", lambda trajectories: seen.append(len(trajectories)) or [])
    problems = [task.Problem(23, "+", 45), task.Problem(77, "-", 31)]
    ask_all(node.app, problems, model="headwater", answers=2, seed=0)
    policy = world.setups[0].config.policy
    law = policy.read_text()
    policy.write_text(law + '[redaction]\npatterns = { sums = "\\\\d+\\\\+\\\\d+" }\n')
    world.clock.set(world.clock() + 60)
    node.sealed_update(*signed(world, plan_of(world)))
    assert seen == [2]  # the two answers about a difference
    policy.write_text(law + "[collection]\nretention_days = 1\n")
    world.clock.set(world.clock() + 2 * 86_400)
    ask_all(node.app, problems[:1], model="headwater", answers=1, seed=0)  # serving is enough to delete the old
    world.setups[0].config.policy.unlink()
    assert len(list(node.store.read(after_s=0, until_s=4e9))) == 1
    monkeypatch.undo()
    policy.write_text(law + "[collection]\nretention_days = 1\n")
    world.clock.set(world.clock() + 2 * 86_400)
    EdgeNode(world.setups[0].config, clock=world.clock).close()  # so is a start
    assert list(node.store.read(after_s=0, until_s=4e9)) == []


@pytest.mark.usefixtures("with_pairs")
def test_a_policy_deleted_during_training_stops_the_upload(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer._run_steps

    def deleting(*arguments: object, **options: object) -> None:
        real(*arguments, **options)  # type: ignore[arg-type]
        world.setups[0].config.policy.unlink()

    monkeypatch.setattr(trainer, "_run_steps", deleting)
    with pytest.raises(PrivacyError, match="only serves"):
        node.sealed_update(*signed(world, plan_of(world)))


@pytest.mark.usefixtures("with_pairs")
def test_two_trainings_on_one_seed_differ(world: World, node: EdgeNode) -> None:
    torch.manual_seed(0)
    first = opened(world, node, plan_of(world))
    other = EdgeNode(world.setups[1].config, clock=world.clock)
    other.look_again()
    torch.manual_seed(0)
    try:
        assert not np.array_equal(opened(world, other, plan_of(world)), first)
    finally:
        other.close()


@pytest.mark.usefixtures("with_pairs")
def test_physical_batches_do_not_change_the_mechanism(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise and with q = 1 the update is a function of the data alone."""
    changes = {"sampling_rate": 1.0}
    updates = []
    for physical_batch, setup in zip((64, 5), world.setups, strict=False):
        config = setup.config.model_copy(update={"physical_batch": physical_batch})
        node = EdgeNode(config, clock=world.clock, unsafe_no_noise=True)
        node.look_again()
        federation = world.federation
        plan = RoundPlan(
            **{
                **{f: getattr(plan_of(world), f) for f in RoundPlan.__dataclass_fields__},
                "training": type(federation.training)(**{**vars(federation.training), **changes}),
            }
        )
        updates.append(opened(world, node, plan))
        assert node.ledger.charges() == []
        node.close()
    np.testing.assert_allclose(updates[0], updates[1], atol=2e-6)


def test_a_plan_that_does_not_verify_trains_nothing(world: World, node: EdgeNode) -> None:
    plan = plan_of(world)
    payload, signature = signed(world, plan)

    def changed(**fields: object) -> tuple[bytes, bytes]:
        values = {f: getattr(plan, f) for f in RoundPlan.__dataclass_fields__}
        return signed(world, RoundPlan(**{**values, **fields}))

    for attempt, expected in (
        ((payload, bytes(64)), "does not verify"),
        ((payload + b" ", signature), "does not verify"),
        (changed(base_digest="0" * 64), "another base model"),
        (changed(adapter_digest="0" * 64), "not the published one"),
        (changed(weights={"site-2": 1, "site-3": 1}), "does not name this site"),
        (changed(federation="other"), "another federation"),
        (changed(deadline_s=world.clock() - 1), "deadline has passed"),
        (changed(adapter_version="../../keys"), "not a version id"),
    ):
        with pytest.raises(TrustError, match=expected):
            node.sealed_update(*attempt)
    with pytest.raises(PrivacyError, match="this site knows"):
        node.sealed_update(*changed(training=type(plan.training)(**{**vars(plan.training), "objective": "ppo"})))
    assert node.ledger.charges() == []
    assert list((world.setups[0].config.data_dir / "updates").iterdir()) == []


def test_a_missing_gradient_stops_training(world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_node.node.preference_pairs", lambda trajectories: random_pairs(40, seed=1))
    monkeypatch.setattr(UnitGradients, "_forward_of", lambda self, layer, index: type(layer).forward.__get__(layer))
    with pytest.raises(PrivacyError, match=r"received no per-unit gradient|without being clipped"):
        node.sealed_update(*signed(world, plan_of(world)))
