"""Which factor a round trains, and that a plan says exactly what the federation fixed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.federation import Federation
from aggregator.plan import make_plan, phase_of
from common.adapter import Adapter
from common.errors import ConfigError, TrustError
from common.identity import SealingKey, SigningKey
from common.plan import Training, sign_plan, verify_plan
from model_hub.rollout import Stage
from model_hub.version import Lineage, ModelVersion
from tests.conftest import changed

KEY = SigningKey(Ed25519PrivateKey.generate())
SEALING = SealingKey(X25519PrivateKey.generate())
TRAINING = Training("dpo", "sgd", 30.0, 2, 0.5, 100.0, 0.1, {"beta": 0.1})


def version_of(adapter: Adapter, phase: str) -> ModelVersion:
    lineage = Lineage("b" * 64, "p" * 64, ("site-1",), "mean", phase)
    return ModelVersion("v7", "v6", adapter.digest, lineage, Stage.STABLE, "x", 0.0)


def federation(**changes: object) -> Federation:
    roster = {f"site-{i}": bytes([i]) * 32 for i in (1, 2, 3)}
    whole = Federation("f", roster, {"site-1": 1, "site-2": 1, "site-3": 1}, KEY, TRAINING, "mean", 9, 2.0, 60.0)
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "last", "expected"),
    [
        ("alternate", "A", "B"),
        ("alternate", "B", "A"),
        ("alternate", "", "B"),  # a version no round has made
        ("ffa", "A", "B"),
        ("ffa", "B", "B"),
        ("ffa", "", "B"),
    ],
)
def test_the_factor_in_turn(start: Adapter, mode: str, last: str, expected: str) -> None:
    adapter = changed(start, seed=1)
    assert phase_of(version_of(adapter, last), adapter, mode=mode) == expected


@pytest.mark.parametrize("mode", ["alternate", "ffa"])
@pytest.mark.parametrize("last", ["", "A", "B"])
def test_while_b_is_zero_b_is_trained(start: Adapter, mode: str, last: str) -> None:
    """A has no gradient then."""
    assert phase_of(version_of(start, last), start, mode=mode) == "B"
    one = np.array(start.tensors[start.names("B")[-1]])
    one[-1, -1] = 1e-20
    adapter = Adapter(start.shape, {**start.tensors, start.names("B")[-1]: one})
    assert phase_of(version_of(adapter, "B"), adapter, mode="alternate") == "A"


@pytest.mark.parametrize(("mode", "phase"), [("alternate", "A"), ("ffa", "B")])
def test_a_plan_says_what_the_federation_fixed(start: Adapter, mode: str, phase: str) -> None:
    adapter = changed(start, seed=1)
    fixed = federation(lora_mode=mode, balance=True, patience=3)
    plan = make_plan(fixed, version_of(adapter, "B"), adapter, number=4, sealing_key=SEALING, now_s=1000.0)
    assert (plan.federation, plan.round, plan.planned_rounds) == ("f", 4, 9)
    assert (plan.base_digest, plan.adapter_version, plan.adapter_digest) == ("b" * 64, "v7", adapter.digest)
    assert (plan.lora_phase, plan.clip_norm, plan.training) == (phase, 2.0, TRAINING)
    assert (plan.weights, plan.roster_digest) == (fixed.weights, fixed.roster_digest)
    assert (plan.sealing_key, plan.deadline_s) == (SEALING.public.hex(), 1060.0)
    assert verify_plan(plan.payload, sign_plan(plan, KEY), aggregator=KEY.public) == plan


def test_a_plan_of_other_hyper_parameters_is_another_plan(start: Adapter) -> None:
    def plan(**changes: object) -> str:
        training = dataclasses.replace(TRAINING, **changes)  # type: ignore[arg-type]
        return make_plan(
            federation(training=training), version_of(start, ""), start, number=1, sealing_key=SEALING, now_s=0.0
        ).digest

    digests = [plan(), plan(hyperparameters={"beta": 0.2}), plan(lora_dropout=0.1), plan(optimizer="adam")]
    assert len(set(digests)) == len(digests)
    assert plan(hyperparameters={"a": 1, "b": 2}) == plan(hyperparameters={"b": 2.0, "a": 1.0})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hyperparameters": {"beta": float("nan")}}, "finite"),
        ({"hyperparameters": {"beta": float("inf")}}, "finite"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"lora_dropout": -0.1}, "lora_dropout"),
        ({"lora_dropout": float("nan")}, "lora_dropout"),
        ({"sampling_rate": 1.1}, "sampling_rate"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"expected_batch": float("nan")}, "expected_batch"),
        ({"unit_clip_norm": 0.0}, "unit_clip_norm"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"steps": 0}, "steps"),
        ({"steps": 10_001}, "steps"),
    ],
)
def test_training_that_no_site_could_do_is_not_planned(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        dataclasses.replace(TRAINING, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"beta":0.1', b'"beta":"0.1"'),
        (b'"beta":0.1', b'"beta":1e999'),
        (b'"beta":0.1', b'"beta":null'),
        (b'"beta":0.1', b'"beta":[0.1]'),
        (b'"lora_dropout":0.0', b'"lora_dropout":1.0'),
        (b'"lora_phase":"A"', b'"lora_phase":"AB"'),
        (b'"lora_phase":"A"', b'"lora_phase":"A","lora_mode":"both"'),
        (b'"steps":2', b'"steps":2.5'),
    ],
)
def test_a_signed_plan_that_is_malformed_is_not_read(start: Adapter, old: bytes, new: bytes) -> None:
    adapter = changed(start, seed=1)
    plan = make_plan(federation(), version_of(adapter, "B"), adapter, number=1, sealing_key=SEALING, now_s=0.0)
    assert plan.payload.count(old) == 1
    payload = plan.payload.replace(old, new)
    with pytest.raises(TrustError, match="malformed"):
        verify_plan(payload, KEY.sign("round-plan", payload), aggregator=KEY.public)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown LoRA mode 'both'; known modes: alternate, ffa"):
        federation(lora_mode="both")
