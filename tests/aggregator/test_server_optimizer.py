"""The server's optimizers: their formulas, and that moments never outlive a step that did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.federation import Federation
from aggregator.plan import make_plan
from aggregator.publish import publish
from aggregator.server_optimizer import OPTIMIZERS, Moments, MomentsStore, ServerOptimizer, step
from common.adapter import Adapter
from common.errors import ConfigError, TransportError
from common.identity import SealingKey, SigningKey
from common.plan import RoundPlan, Training
from common.update import Aggregate
from model_hub.hub import Hub
from model_hub.rollout import Stage
from model_hub.version import ModelVersion

KEY = SigningKey(Ed25519PrivateKey.generate())
SEALING = SealingKey(X25519PrivateKey.generate())
TRAINING = Training("dpo", "sgd", 30.0, 2, 0.5, 100.0, 0.1, {"beta": 0.1})
MOMENTUM = ServerOptimizer("fedavgm", beta_1=0.5)
CLIP = 10.0


def changes(count: int, parameters: int = 30, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, parameters)).astype(np.float32)


# --- formulas (parity with Flower's is in tests/parity)


def test_averaging_adds_the_change_and_remembers_nothing() -> None:
    (delta,) = changes(1)
    average = ServerOptimizer()
    made, after = step(
        average, Moments.none(average, 30), delta, longest=1e-9
    )  # the gates judge it, as they always did
    np.testing.assert_array_equal(made, delta)
    assert after.steps == 0
    assert not average.remembers


def test_momentum_is_the_decayed_sum() -> None:
    deltas = changes(3)
    moments = Moments.none(MOMENTUM, 30)
    for delta in deltas:
        made, moments = step(MOMENTUM, moments, delta, longest=1e9)
    np.testing.assert_allclose(made, deltas[2] + 0.5 * deltas[1] + 0.25 * deltas[0], rtol=1e-6, atol=1e-6)
    assert moments.steps == 3


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([name for name in OPTIMIZERS if name != "average"]),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 10),
    st.integers(1, 6),
)
def test_no_step_is_longer_than_the_clip_and_its_direction_is_kept(
    name: str, size: float, longest: float, count: int
) -> None:
    optimizer = ServerOptimizer(name, learning_rate=3.0)
    free = bounded = Moments.none(optimizer, 30)
    for delta in size * changes(count):
        far, free = step(optimizer, free, delta.astype(np.float32), longest=1e30)
        made, bounded = step(optimizer, bounded, delta.astype(np.float32), longest=longest)
        assert np.linalg.norm(made) <= longest * (1 + 1e-5)
        cosine = np.dot(far.astype(float), made) / (np.linalg.norm(far) * np.linalg.norm(made))
        assert cosine == pytest.approx(1, abs=1e-5)
        assert made.dtype == bounded.first_D.dtype == np.float32
    np.testing.assert_array_equal(free.first_D, bounded.first_D)


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({"name": "adam"}, "known: average, fedavgm, fedadam"),
        ({"learning_rate": 0.5}, "plain averaging"),
        ({"name": "fedavgm", "learning_rate": 0.0}, "positive"),
        ({"name": "fedavgm", "learning_rate": float("nan")}, "positive"),
        ({"name": "fedavgm", "beta_1": 1.0}, "below 1"),
        ({"name": "fedadam", "beta_2": -0.1}, "at least 0"),
        ({"name": "fedadam", "tau": 0.0}, "positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings_: dict, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ServerOptimizer(**settings_)


# --- the store


def stored(count: int = 1) -> Moments:
    moments = Moments.none(MOMENTUM, 30)
    for delta in changes(count):
        _, moments = step(MOMENTUM, moments, delta, longest=1e9)
    return moments


def test_moments_come_back_as_they_were_for_their_plan_and_settings_only(tmp_path: Path) -> None:
    store = MomentsStore(tmp_path / "moments")
    assert store.load("a" * 64, MOMENTUM) == {}
    store.save("a" * 64, MOMENTUM, {"B": stored(2)})
    again = MomentsStore(tmp_path / "moments").load("a" * 64, MOMENTUM)
    assert list(again) == ["B"]
    assert again["B"].steps == 2
    np.testing.assert_array_equal(again["B"].first_D, stored(2).first_D)
    assert store.load("b" * 64, MOMENTUM) == {}
    assert store.load("a" * 64, dataclasses.replace(MOMENTUM, beta_1=0.4)) == {}
    assert store.load("a" * 64, ServerOptimizer()) == {}
    assert store.load("", MOMENTUM) == {}
    (file,) = (tmp_path / "moments").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.rename(file.with_stem("c" * 64))  # under another plan's name they are not that plan's
    assert store.load("c" * 64, MOMENTUM) == {}


def test_damaged_moments_are_an_error_and_not_a_silent_fresh_start(tmp_path: Path) -> None:
    store = MomentsStore(tmp_path)
    store.save("a" * 64, MOMENTUM, {"B": stored()})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(TransportError, match="delete the file"):
        store.load("a" * 64, MOMENTUM)


def test_a_digest_that_is_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal"):
        MomentsStore(tmp_path).save("../../elsewhere", MOMENTUM, {})


# --- moments and versions


@pytest.fixture
def hub(tmp_path: Path, start: Adapter) -> Iterator[Hub]:
    opened = Hub(tmp_path / "hub", KEY, base_model="embedded", clock=lambda: 1000.0)
    opened.found(start, base_digest="b" * 64)
    yield opened
    opened.close()


@pytest.fixture
def store(tmp_path: Path) -> MomentsStore:
    return MomentsStore(tmp_path / "moments")


def federation(**changes_: object) -> Federation:
    roster = {f"site-{i}": bytes([i]) * 32 for i in (1, 2, 3)}
    weights = dict.fromkeys(roster, 1)
    whole = Federation("f", roster, weights, KEY, TRAINING, "mean", 99, CLIP, 60.0, lora_mode="ffa", optimizer=MOMENTUM)
    return dataclasses.replace(whole, **changes_)  # type: ignore[arg-type]


def plan(hub: Hub, number: int, *, phase: str | None = None) -> RoundPlan:
    made = make_plan(
        federation(), hub.stable, hub.adapter(hub.stable.id), number=number, sealing_key=SEALING, now_s=float(number)
    )
    return dataclasses.replace(made, lora_phase=phase or made.lora_phase)


def delta(hub: Hub, phase: str, seed: int) -> np.ndarray:
    size = hub.adapter("v0").flatten(hub.adapter("v0").names(phase)).size
    drawn = np.random.default_rng(seed).normal(size=size)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def submitted(
    hub: Hub, store: MomentsStore, number: int, *, phase: str = "B", promote: bool = True
) -> tuple[ModelVersion, np.ndarray]:
    """A round's version, promoted or rolled back; and the step it made."""
    current = plan(hub, number, phase=phase)
    before = hub.adapter(hub.stable.id).flatten(hub.adapter("v0").names(phase))
    aggregate = Aggregate(current.digest, delta(hub, phase, number), ("site-1",), (), "mean")
    version = publish(aggregate, current, hub, balance=False, optimizer=MOMENTUM, moments=store)
    assert version.stage is Stage.GATED or hub.canary is not None
    if promote:
        hub._move((hub.stable.id, Stage.RETIRED, "test"), (version.id, Stage.STABLE, "test"))
    else:
        hub._move((version.id, Stage.ROLLED_BACK, "test"))
    return version, hub.adapter(version.id).flatten(hub.adapter("v0").names(phase)) - before


def test_a_step_builds_on_those_of_the_stable_version(hub: Hub, store: MomentsStore) -> None:
    for number in (1, 2):
        _, made = submitted(hub, store, number)
    np.testing.assert_allclose(made, delta(hub, "B", 2) + 0.5 * delta(hub, "B", 1), atol=1e-6)


def test_the_momentum_of_a_version_that_was_rolled_back_is_gone(hub: Hub, store: MomentsStore) -> None:
    submitted(hub, store, 1)
    submitted(hub, store, 2, promote=False)
    _, made = submitted(hub, store, 3)
    np.testing.assert_allclose(made, delta(hub, "B", 3) + 0.5 * delta(hub, "B", 1), atol=1e-6)


def test_each_factor_has_its_own(hub: Hub, store: MomentsStore) -> None:
    submitted(hub, store, 1, phase="B")
    _, first_a = submitted(hub, store, 2, phase="A")
    np.testing.assert_allclose(first_a, delta(hub, "A", 2), atol=1e-6)
    _, second_b = submitted(hub, store, 3, phase="B")
    np.testing.assert_allclose(second_b, delta(hub, "B", 3) + 0.5 * delta(hub, "B", 1), atol=1e-6)


def test_a_restart_changes_nothing(hub: Hub, store: MomentsStore, tmp_path: Path) -> None:
    submitted(hub, store, 1)
    _, made = submitted(hub, MomentsStore(tmp_path / "moments"), 2)
    np.testing.assert_allclose(made, delta(hub, "B", 2) + 0.5 * delta(hub, "B", 1), atol=1e-6)


def test_a_kill_between_moments_and_version_moves_them_once(
    hub: Hub, store: MomentsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(hub, store, 1)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Hub, "submit", killed)
        with pytest.raises(KeyboardInterrupt):
            submitted(hub, store, 2)
    _, made = submitted(hub, store, 2)
    np.testing.assert_allclose(made, delta(hub, "B", 2) + 0.5 * delta(hub, "B", 1), atol=1e-6)
    _, third = submitted(hub, store, 3)
    expected = delta(hub, "B", 3) + 0.5 * delta(hub, "B", 2) + 0.25 * delta(hub, "B", 1)
    np.testing.assert_allclose(third, expected, atol=1e-6)


def test_only_what_may_be_built_on_is_kept(hub: Hub, store: MomentsStore, tmp_path: Path) -> None:
    for number in range(1, 5):
        submitted(hub, store, number, promote=number != 3)
    assert len(list((tmp_path / "moments").iterdir())) <= 3


def test_plain_averaging_writes_nothing(hub: Hub, tmp_path: Path) -> None:
    current = plan(hub, 1)
    aggregate = Aggregate(current.digest, delta(hub, "B", 1), ("site-1",), (), "mean")
    store = MomentsStore(tmp_path / "none")
    publish(aggregate, current, hub, balance=False, optimizer=ServerOptimizer(), moments=store)
    assert not (tmp_path / "none").exists()


def test_moments_and_balancing_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="switch balance off"):
        federation(balance=True)
