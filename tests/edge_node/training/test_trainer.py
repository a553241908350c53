"""A whole round of private training on one node's data."""

from __future__ import annotations

import dataclasses
import shutil
from itertools import islice

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.plan import make_plan
from common.accounting import PrivateSteps
from common.adapter import Adapter
from common.errors import PrivacyError, TransportError, TrustError
from common.identity import SealingKey, load_or_create_signing_key, write_private
from common.inference.model_folder import open_model
from common.plan import RoundPlan, sign_plan
from common.tasks import math as task
from common.update import PrivateUpdate, open_update
from deploy.drills import crashing
from deploy.users import ask_all, thumbs
from deploy.world import World
from edge_node.collecting.trajectory_pb2 import Feedback
from edge_node.node import EdgeNode
from edge_node.training import site_training, trainer
from edge_node.training.checkpoints import Checkpoint, Checkpoints
from edge_node.training.dataset import Dataset
from edge_node.training.ledger import Ledger
from edge_node.training.lora_model import LoraModel
from edge_node.training.private_step import RESERVE
from edge_node.training.trainer import TRAINING, Round
from edge_node.training.unit_gradients import FlatGradients
from edge_node.training.units import Unit
from model_hub.version import Lineage
from tests.edge_node.training.examples import losses_of, random_units

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
        node.sealed_update(*signed(world, plan), ""),
        plan,
        {name: start.tensors[name].shape for name in start.names(plan.lora_phase)},
        site_public=node.key.public,
        key=SEALING,
    )


BUILD = "edge_node.training.site_training.build_dataset"


def dataset(units: list[Unit]) -> Dataset:
    return Dataset(tuple(units), {})


@pytest.fixture
def with_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUILD, lambda *_, **__: dataset(random_units("dpo", 12, seed=1)))


@pytest.mark.usefixtures("with_pairs")
def test_a_round_is_charged_before_the_first_step_and_sent_again_without_new_noise(
    world: World, node: EdgeNode
) -> None:
    plan = plan_of(world)
    first = opened(world, node, plan)
    charges, law = node.training.ledger.charges(), node.policy.law().privacy
    assert [c.plan_digest for c in charges] == [plan.digest]
    training = plan.training
    assert charges[0].event == PrivateSteps(
        trainer.planned_noise(training, rounds=2, epsilon_total=law.epsilon_total, delta=law.delta, counted=False),
        training.sampling_rate,
        training.steps,
    )
    np.testing.assert_array_equal(opened(world, node, plan), first)
    assert node.training.ledger.charges() == charges
    assert np.linalg.norm(first.astype(np.float64)) <= plan.clip_norm * (1 + 1e-6)


@pytest.mark.usefixtures("with_pairs")
def test_all_planned_rounds_fit_the_budget_and_one_more_does_not(world: World, node: EdgeNode) -> None:
    law = node.policy.law().privacy
    for number in (1, 2):
        opened(world, node, plan_of(world, number))
    assert law.epsilon_total * 0.95 < node.training.ledger.epsilon_spent(law.delta) <= law.epsilon_total
    again = dataclasses.replace(plan_of(world, 2), planned_rounds=3, round=3)
    with pytest.raises(PrivacyError, match="is left") as error:
        node.sealed_update(*signed(world, again), "")
    assert error.value.public == "the site's privacy budget does not hold another round"


@pytest.mark.usefixtures("with_pairs")
def test_a_round_that_crashed_is_repeated_with_the_draws_it_had_or_not_at_all(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with its update finished and not yet stored: the second try must come to the same bytes."""
    plan, lost = plan_of(world), []

    def full(update: PrivateUpdate, **_: float) -> None:
        lost.append(update.delta_D)
        raise TransportError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(node.training.updates, "put", full)
        for _ in range(2):
            with pytest.raises(TransportError, match="disk full"):
                node.sealed_update(*signed(world, plan), "")
    np.testing.assert_array_equal(lost[0], lost[1])
    world.clock.set(world.clock() + 60)
    with pytest.raises(PrivacyError, match="charged before"):  # another plan for the same round does not help
        node.sealed_update(*signed(world, plan_of(world)), "")
    key = next((world.setups[0].config.data_dir / "checkpoints").rglob("round.key"))
    kept = key.read_bytes()
    key.unlink()
    for _ in range(2):
        with pytest.raises(PrivacyError, match="charged before"):  # it would be new noise
            node.sealed_update(*signed(world, plan), "")
    write_private(key, kept)
    np.testing.assert_array_equal(opened(world, node, plan), lost[0])
    assert len(node.training.ledger.charges()) == 1
    assert not key.exists()


def test_the_noise_of_an_update_is_what_was_charged(world: World, node: EdgeNode) -> None:
    """Without data the update is -lr · (σ·C / expected batch) · noise, once per step; nothing else explains its size."""
    training = dataclasses.replace(world.federation.training, learning_rate=1.0)
    plan = dataclasses.replace(plan_of(world), training=training, clip_norm=1e6)
    update = opened(world, node, plan).astype(np.float64)
    sigma = node.training.ledger.charges()[0].event.noise_multiplier
    expected = np.sqrt(training.steps) * sigma * training.unit_clip_norm / training.expected_batch
    assert abs(update.std() / expected - 1) < 0.02


def test_batches_are_drawn_at_the_charged_rate_and_divided_by_a_constant(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal pairs, clipped, without noise: the update's length is lr · C · (pairs drawn) / expected batch."""
    (pair,) = random_units("dpo", 1, seed=1)
    count = 40
    training = dataclasses.replace(
        world.federation.training,
        steps=1,
        sampling_rate=0.3,
        unit_clip_norm=1e-6,
        learning_rate=1.0,
        expected_batch=7.0,
    )
    monkeypatch.setattr(BUILD, lambda *_, **__: dataset([pair] * count))
    node = EdgeNode(world.setups[0].config, clock=world.clock, unsafe_no_noise=True)
    node.look_again()
    drawn = []
    for second in range(25):
        world.clock.set(world.clock() + 1)
        plan = dataclasses.replace(plan_of(world), training=training, deadline_s=world.clock() + 1000 + second)
        length = np.linalg.norm(opened(world, node, plan).astype(np.float64))
        drawn.append(length * 7.0 / (1e-6 * (1 - RESERVE)))
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
        again.sealed_update(*signed(world, plan_of(world, 2)), "")
    again.close()


def test_a_site_without_data_sends_noise_rather_than_say_so(world: World, node: EdgeNode) -> None:
    update = opened(world, node, plan_of(world))
    assert np.linalg.norm(update) > 0
    assert len(node.training.ledger.charges()) == 1


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
    update = node.sealed_update(*signed(world, plan), "")
    assert update.ledger_entry


def test_an_update_made_without_noise_is_not_sent_by_a_private_node(world: World) -> None:
    plan = plan_of(world)
    unsafe = EdgeNode(world.setups[0].config, clock=world.clock, unsafe_no_noise=True)
    unsafe.look_again()
    assert unsafe.sealed_update(*signed(world, plan), "").ledger_entry == "unsafe-no-dp"
    unsafe.close()
    node = EdgeNode(world.setups[0].config, clock=world.clock)
    node.look_again()
    with pytest.raises(PrivacyError, match="without noise"):
        node.sealed_update(*signed(world, plan), "")
    node.close()


def test_an_altered_ledger_leaves_a_node_that_serves(world: World, node: EdgeNode) -> None:
    opened(world, node, plan_of(world))
    node.close()
    (world.setups[0].config.data_dir / "ledger.sqlite").write_bytes(b"broken")
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    again.look_again()
    problems = [task.Problem(23, "+", 45)]
    assert len(ask_all(again.app, problems, model="headwater", answers=1, seed=0)[0].texts) == 1
    with pytest.raises(TrustError) as error:
        again.sealed_update(*signed(world, plan_of(world, 2)), "")
    assert error.value.public == "this site's privacy ledger does not verify"
    again.close()


def test_records_are_trained_on_under_the_law_in_force_now(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(BUILD, lambda trajectories, *_, **__: seen.append(len(trajectories)) or dataset([]))
    problems = [task.Problem(23, "+", 45), task.Problem(77, "-", 31)]
    ask_all(node.app, problems, model="headwater", answers=2, seed=0)
    policy = world.setups[0].config.policy
    law = policy.read_text()
    policy.write_text(law + '[redaction]\npatterns = { sums = "\\\\d+\\\\+\\\\d+" }\n')
    world.clock.set(world.clock() + 60)
    node.sealed_update(*signed(world, plan_of(world)), "")
    assert seen == [2]  # the two answers about a difference
    policy.write_text(law + "[collection]\nretention_days = 1\n")
    world.clock.set(world.clock() + 2 * 86_400)
    ask_all(node.app, problems[:1], model="headwater", answers=1, seed=0)  # serving is enough to delete the old
    world.setups[0].config.policy.unlink()
    assert len(list(node.store.read(after_s=0, until_s=4e9))) == 1
    monkeypatch.undo()
    policy.write_text(law + "[collection]\nretention_days = 1\n")
    world.clock.set(world.clock() + 2 * 86_400)
    node.close()
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
        node.sealed_update(*signed(world, plan_of(world)), "")


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
    for changed, setup in zip(
        ({"physical_batch": 64}, {"physical_batch": 5}, {"physical_batch": "auto", "engine": "one-unit"}),
        world.setups,
        strict=True,
    ):
        config = setup.config.model_copy(update={"training": setup.config.training.model_copy(update=changed)})
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
        assert node.training.ledger.charges() == []
        node.close()
    for other in updates[1:]:
        np.testing.assert_allclose(updates[0], other, atol=2e-6)


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
            node.sealed_update(*attempt, "")
    with pytest.raises(PrivacyError, match="this site knows"):
        node.sealed_update(*changed(training=type(plan.training)(**{**vars(plan.training), "objective": "sgd"})), "")
    assert node.training.ledger.charges() == []
    assert list((world.setups[0].config.data_dir / "updates").iterdir()) == []


def test_a_missing_gradient_stops_training(world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUILD, lambda *_, **__: dataset(random_units("dpo", 40, seed=1)))
    monkeypatch.setattr(site_training, "self_test", lambda *_, **__: [])
    monkeypatch.setattr(site_training, "_PASSED", set())
    monkeypatch.setattr(FlatGradients, "_forward_of", lambda self, layer, index: type(layer).forward.__get__(layer))
    with pytest.raises(PrivacyError, match=r"received no per-unit gradient|without being clipped"):
        node.sealed_update(*signed(world, plan_of(world)), "")


@pytest.mark.usefixtures("with_pairs")
def test_training_does_not_start_where_the_self_test_fails(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind of fault a pair of libraries brings: gradients come out, but they are the wrong ones."""
    real = FlatGradients._accumulate

    def wrong(self: FlatGradients, index: int, x: torch.Tensor, grad: torch.Tensor) -> None:
        real(self, index, x * 1.01, grad)

    monkeypatch.setattr(site_training, "_PASSED", set())
    monkeypatch.setattr(FlatGradients, "_accumulate", wrong)
    with pytest.raises(PrivacyError, match="self-test fails at per-unit gradients") as error:
        node.sealed_update(*signed(world, plan_of(world)), "")
    assert error.value.public == "this site's self-test of private training fails"
    assert node.training.ledger.charges() == []


def counting(world: World, minimum: int) -> EdgeNode:
    config = world.setups[0].config
    training = config.training.model_copy(update={"min_samples": minimum})
    node = EdgeNode(config.model_copy(update={"training": training}), clock=world.clock)
    node.look_again()
    return node


@pytest.mark.parametrize(("minimum", "ready"), [(150, False), (20, True)])
def test_a_site_takes_part_by_a_noisy_count_that_is_charged_once(
    world: World, monkeypatch: pytest.MonkeyPatch, minimum: int, ready: bool
) -> None:
    """85 units or 65 deviations away from the threshold: far enough for noise of 10."""
    monkeypatch.setattr(BUILD, lambda *_, **__: dataset(random_units("dpo", 85, seed=1)))
    node, plan = counting(world, minimum), plan_of(world)
    ledger = node.training.ledger
    for _ in range(2):
        if ready:
            assert np.linalg.norm(opened(world, node, plan)) > 0
        else:
            with pytest.raises(PrivacyError, match="noisy count") as error:
                node.sealed_update(*signed(world, plan), "")
            assert error.value.public == "the site has too little data by a noisy count, which it has charged"
        assert [charge.purpose for charge in ledger.charges()] == ["readiness", "training"][: 1 + ready]
    law = node.policy.law().privacy
    assert ledger.mechanisms()["readiness"] == PrivateSteps(10.0, 1.0, 1)
    assert ledger.rounds_left(law.epsilon_total, law.delta) == 1  # of two: the count is part of what was planned
    node.close()


ROUNDING = 1e-4
"""How far a weight may be off where passes were grouped by other free memory, after Adam; other noise moves it by 1e-2."""


def long_plan(world: World, steps: int) -> RoundPlan:
    training = dataclasses.replace(world.federation.training, steps=steps, sampling_rate=0.2, optimizer="adam")
    return dataclasses.replace(plan_of(world), training=training)


@pytest.mark.usefixtures("with_pairs")
def test_an_interrupted_round_goes_on_from_its_checkpoint_without_another_charge(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "EVERY_STEPS", 3)
    plan, steps = long_plan(world, 8), []
    real = trainer.noisy_sum

    def stopping_at(last: int) -> None:
        def step(*arguments: object, **options: object) -> torch.Tensor:
            steps.append(1)
            if len(steps) == last:
                raise MemoryError
            return real(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(trainer, "noisy_sum", step)

    stopping_at(8)
    with pytest.raises(MemoryError):
        node.sealed_update(*signed(world, plan), "")
    checkpoints = node.training.checkpoints
    assert checkpoints.steps(plan.digest) == [3, 6]
    record = checkpoints.read(plan.digest, 6).record
    assert record.plan == dataclasses.asdict(plan)
    assert record.noise_multiplier == node.training.ledger.mechanisms()[TRAINING].noise_multiplier
    node.close()
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    again.look_again()
    found = []
    for start in (6, 3):  # from any of them, and the same comes out
        checkpoints.rewind(plan.digest, step=start)
        del steps[:]
        stopping_at(0)
        with monkeypatch.context() as patch:
            patch.setattr(again.training.updates, "put", lambda update, **_: found.append(update.delta_D))
            patch.setattr(again.training, "_commit", lambda *_: None)
            patch.setattr(again.training.checkpoints, "remove", lambda _: None)
            again.sealed_update(*signed(world, plan), "")
        assert len(steps) == 8 - start
    np.testing.assert_allclose(found[0], found[1], atol=ROUNDING)
    first = opened(world, again, plan)
    np.testing.assert_allclose(first, found[0], atol=ROUNDING)
    assert len(again.training.ledger.charges()) == 1
    assert checkpoints.steps(plan.digest) == []  # finished: never again with new noise
    np.testing.assert_array_equal(opened(world, again, plan), first)
    again.close()


@pytest.mark.usefixtures("with_pairs")
def test_a_checkpoint_restores_weights_and_optimizer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise and with q = 1, interrupted and uninterrupted training are the same numbers."""
    monkeypatch.setattr(trainer, "EVERY_STEPS", 2)
    training = dataclasses.replace(long_plan(world, 5).training, sampling_rate=1.0)
    plan = dataclasses.replace(plan_of(world), training=training, clip_norm=1e6)
    start = world.hub.adapter("v0")

    def train(checkpoint: Checkpoint | None, folder: Checkpoints) -> np.ndarray:
        model = LoraModel(open_model(world.setups[0].config.model), start.shape)
        model.start(start, start.names("B"))
        engine = FlatGradients(model.peft_model)
        losses = losses_of(model, "dpo")
        work = Round(plan, start, random_units("dpo", 6, seed=1), pad_id=0)
        trainer._run_steps(work, model, engine, losses, trainer._Paid(0.0, "0" * 64, checkpoint), folder)
        return trainer._clipped_change(start, model, start.names("B"), 1e6)

    folder = Checkpoints(world.folder / "checkpoints")
    whole = train(None, folder)
    assert np.linalg.norm(whole) > 1e-3
    assert folder.steps(plan.digest) == [2, 4]
    for step in (2, 4):
        resumed = train(folder.read(plan.digest, step), Checkpoints(world.folder / f"other-{step}"))
        np.testing.assert_allclose(resumed, whole, atol=ROUNDING)


@pytest.mark.usefixtures("with_pairs")
def test_a_stored_update_that_is_not_the_committed_one_is_not_sent(world: World, node: EdgeNode) -> None:
    plan = plan_of(world)
    opened(world, node, plan)
    stored = node.training.updates.get(plan.digest)
    assert stored is not None
    node.training.updates.put(dataclasses.replace(stored, delta_D=stored.delta_D * 2), data_until_s=0.0)
    with pytest.raises(TrustError, match="not the one that was committed"):
        node.sealed_update(*signed(world, plan), "")


@pytest.mark.usefixtures("with_pairs")
def test_a_ledger_that_went_back_behind_what_others_have_seen_trains_no_more(world: World, node: EdgeNode) -> None:
    """A backup of the whole data folder, restored after another round."""
    data = world.setups[0].config.data_dir
    opened(world, node, plan_of(world))
    node.close()
    shutil.copytree(data, world.folder / "backup")
    later = EdgeNode(world.setups[0].config, clock=world.clock)
    later.look_again()
    head = later.sealed_update(*signed(world, plan_of(world, 2)), "").ledger_head
    later.close()
    shutil.rmtree(data)
    shutil.copytree(world.folder / "backup", data)
    restored = EdgeNode(world.setups[0].config, clock=world.clock)
    restored.look_again()
    charges = restored.training.ledger.charges()
    with pytest.raises(TrustError, match="restored backup or a clone"):
        restored.sealed_update(*signed(world, plan_of(world, 2)), head)
    with pytest.raises(TrustError, match="restored backup or a clone"):  # also where nobody shows what they know
        restored.sealed_update(*signed(world, plan_of(world, 2)), "")
    restored.close()
    key = load_or_create_signing_key(data / "keys" / "identity.pem")
    ledger = Ledger(data / "ledger.sqlite", key)
    assert ledger.charges() == charges
    ledger.close()


def test_a_plan_whose_steps_take_too_long_is_refused_before_anything_is_charged(world: World) -> None:
    config = world.setups[0].config
    slow = config.training.model_copy(update={"iteration_limit_s": 1e-6})
    node = EdgeNode(config.model_copy(update={"training": slow}), clock=world.clock)
    node.look_again()
    with pytest.raises(PrivacyError, match="minutes here") as error:
        node.sealed_update(*signed(world, plan_of(world)), "")
    assert error.value.public == "this site's machine is too slow for the plan's batches"
    assert node.training.ledger.charges() == []
    node.close()


def test_what_does_not_depend_on_records_is_refused_before_they_are_read(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time of a refusal that costs nothing would tell how much a site has."""
    monkeypatch.setattr(BUILD, lambda *_, **__: dataset(random_units("dpo", 12, seed=1)))
    for number in (1, 2):
        opened(world, node, plan_of(world, number))

    def read(**_: float) -> None:
        raise AssertionError("the records were read")

    monkeypatch.setattr(node.store, "read", read)
    settings = node.training._settings.model_copy(update={"gradient_checkpointing": True})
    monkeypatch.setattr(node.training, "_settings", settings)
    training = world.federation.training
    plan = plan_of(world)
    charges = node.training.ledger.charges()
    for changed, reason in (
        ({"training": dataclasses.replace(training, optimizer="lion")}, "optimizer 'lion'"),
        ({"training": dataclasses.replace(training, objective="ipo", hyperparameters={"beta": 0.0})}, "must be within"),
        ({"training": dataclasses.replace(training, expected_batch=1e9)}, "minutes here"),
        ({"training": dataclasses.replace(training, lora_dropout=0.1)}, "does not repeat"),
        ({"training": dataclasses.replace(training, steps=3)}, "new schedule needs a new budget"),
        ({}, "is left"),
    ):
        asked = dataclasses.replace(plan, planned_rounds=3, round=3, **changed)
        with pytest.raises(PrivacyError, match=reason):
            node.sealed_update(*signed(world, asked), "")
    assert node.training.ledger.charges() == charges


@pytest.mark.parametrize(("largest", "used"), [(9.0, "FlatGradients"), (11.0, "OneUnitGradients")])
def test_units_share_no_pass_under_an_adapter_that_amplifies_rounding(
    world: World, monkeypatch: pytest.MonkeyPatch, largest: float, used: str
) -> None:
    start, plan, seen = world.hub.adapter("v0"), plan_of(world), []
    name = start.names("A")[0]
    start = Adapter(start.shape, {**start.tensors, name: np.full_like(start.tensors[name], largest)})
    model = LoraModel(open_model(world.setups[0].config.model), start.shape)
    model.start(start, start.names("B"))
    real = trainer.noisy_sum

    def noted(units: object, engine: object, *arguments: object, **options: object) -> torch.Tensor:
        seen.append(type(engine).__name__)
        return real(units, engine, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "noisy_sum", noted)
    work = Round(plan, start, random_units("dpo", 3, seed=1), pad_id=0)
    paid, folder = trainer._Paid(1.0, "0" * 64, None), Checkpoints(world.folder / "checkpoints")
    trainer._run_steps(work, model, FlatGradients(model.peft_model), losses_of(model, "dpo"), paid, folder)
    assert seen[0] == used


def test_one_noise_never_meets_two_sets_of_records(world: World) -> None:
    """The difference of the two releases would be the difference of the bare gradients."""
    start, plan = world.hub.adapter("v0"), plan_of(world)
    units = random_units("dpo", 5, seed=1)

    def key(chosen: list[Unit]) -> bytes:
        return trainer._draws_key(Round(plan, start, chosen, pad_id=0, key=b"k" * 32))

    assert key(units) == key(list(units))
    assert len({key(units), key(units[:-1]), key(units[::-1]), key([])}) == 4


@pytest.mark.parametrize("objective", ["ppo", "rft", "grpo", "bco", "ipo", "ppo-sequence"])
def test_every_objective_trains_on_what_the_node_recorded(world: World, node: EdgeNode, objective: str) -> None:
    problems = list(islice(task.problems(task.Distribution(), task.Split.TRAIN, seed=0), 12))
    answers = 4 if objective == "grpo" else 2
    replies = ask_all(node.app, problems, model="headwater", answers=answers, seed=0)
    if objective == "bco":
        for problem, reply in zip(problems, replies, strict=True):
            for name, rating in thumbs(problem, reply):
                assert node.add_feedback(name, Feedback(rating=rating)) == 1
    settings = {"threshold": 0.0} if objective == "rft" else {}
    training = dataclasses.replace(
        world.federation.training, objective=objective, hyperparameters=settings, sampling_rate=1.0
    )
    plan = dataclasses.replace(plan_of(world), training=training)
    world.clock.set(world.clock() + 60)
    found = node.dataset(training)
    assert len(found.units) >= {"grpo": 10, "ipo": 3}.get(objective, 20), found.left_out
    assert np.linalg.norm(opened(world, node, plan)) > 0


def test_ppo_does_without_answers_that_have_no_log_probabilities_and_dpo_does_not_mind(
    world: World, node: EdgeNode
) -> None:
    node.import_records(
        ['{"prompt": "What is 12+13?", "chosen": "2+3=5 ; 10+10=20\\nAnswer: 25", "rejected": "no"}'] * 3
        + [
            '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "reward": 1}',
        ]
    )
    world.clock.set(world.clock() + 60)
    units = {
        objective: node.dataset(dataclasses.replace(world.federation.training, objective=objective, hyperparameters={}))
        for objective in ("ppo", "dpo")
    }
    assert len(units["ppo"].units) == 0
    assert units["ppo"].left_out["no log-probabilities"] == 1
    assert len(units["dpo"].units) == 3
