"""A site says whether it has enough data by a noisy count, once a round, and pays for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.accounting import PrivateSteps
from common.errors import PrivacyError, TransportError
from common.identity import SigningKey
from edge_node.policy import Privacy
from edge_node.training.ledger import Ledger
from edge_node.training.noise import SecureRandom
from edge_node.training.readiness import READINESS, READINESS_EVENT, require_enough_units

PUBLIC = "the site has too little data by a noisy count, which it has charged"
PLAN = "a" * 64
LAW = Privacy(unit="trajectory", epsilon_total=8.0, delta=1e-5)


class Drawn(SecureRandom):
    """Draws what it was told, and remembers being asked."""

    def __init__(self, *normals: float) -> None:
        super().__init__()
        self.normals = list(normals)

    def normal(self, count: int) -> np.ndarray:
        return np.array([self.normals.pop(0) for _ in range(count)])


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.sqlite", SigningKey(Ed25519PrivateKey.generate()))
    ledger.open_budget(
        {"training": PrivateSteps(2.0, 0.5, 2), READINESS: READINESS_EVENT}, now_s=0.0, unit="trajectory"
    )
    yield ledger
    ledger.close()


def is_ready(
    ledger: Ledger,
    units: int,
    random: SecureRandom,
    *,
    min_samples: int = 100,
    round_name: str = "f/1",
    plan_digest: str = PLAN,
    privacy: Privacy = LAW,
) -> bool:
    try:
        require_enough_units(
            units,
            min_samples=min_samples,
            round_name=round_name,
            plan_digest=plan_digest,
            privacy=privacy,
            ledger=ledger,
            random=random,
            now_s=1.0,
        )
    except PrivacyError as error:
        if error.public != PUBLIC:
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("units", "drawn", "ready"),
    [
        (100, 0.0, True),
        (99, 0.0, False),
        (90, 1.0, True),
        (90, 0.94, False),  # 9.4 units, rounded to 9
        (110, -1.0, True),
        (110, -1.1, False),
        (0, 10.0, True),
        (1000, -91.0, False),
    ],
)
def test_one_unit_of_noise_is_what_the_ledger_charges(ledger: Ledger, units: int, drawn: float, ready: bool) -> None:
    """A count moves by one with one unit: its noise has the charged multiplier as standard deviation."""
    assert PrivateSteps(noise_multiplier=10.0, sampling_rate=1.0, steps=1) == READINESS_EVENT
    assert is_ready(ledger, units, Drawn(drawn)) is ready
    (charge,) = ledger.charges()
    assert (charge.purpose, charge.round, charge.plan_digest, charge.event) == (READINESS, "f/1", PLAN, READINESS_EVENT)


@pytest.mark.parametrize(("units", "ready"), [(1000, True), (0, False)])
def test_with_real_noise_far_counts_are_told_apart(ledger: Ledger, units: int, ready: bool) -> None:
    assert is_ready(ledger, units, SecureRandom(), min_samples=200) is ready


@pytest.mark.parametrize(("first", "later"), [(1.0, -50.0), (-50.0, 1.0)])
def test_a_round_is_counted_once_and_its_answer_stays(ledger: Ledger, first: float, later: float) -> None:
    """Asking again, with other data or another plan, gives nothing new to average."""
    answer = is_ready(ledger, 100, Drawn(first))
    again = Drawn(later)
    for units, plan in ((100, PLAN), (10_000, PLAN), (0, "b" * 64)):
        assert is_ready(ledger, units, again, plan_digest=plan) is answer
    assert again.normals == [later]
    assert len(ledger.charges()) == 1
    assert is_ready(ledger, 100, again, round_name="f/2") is not answer
    assert len(ledger.charges()) == 2


def test_the_answer_outlives_the_process(ledger: Ledger, tmp_path: Path) -> None:
    assert not is_ready(ledger, 0, Drawn(0.0))
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite", ledger._key)
    assert not is_ready(again, 10_000, Drawn())
    again.close()


def test_a_count_that_crashed_before_its_answer_was_kept_is_spent_and_says_no(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise TransportError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", full)
        with pytest.raises(TransportError):
            is_ready(ledger, 1000, Drawn(0.0))
    assert not is_ready(ledger, 1000, Drawn())
    assert len(ledger.charges()) == 1


def test_without_budget_nothing_is_counted(ledger: Ledger) -> None:
    poor = LAW.model_copy(update={"epsilon_total": 0.01})
    random = Drawn(5.0)
    with pytest.raises(PrivacyError, match="is left") as error:
        is_ready(ledger, 1000, random, privacy=poor)
    assert error.value.public == "the site's privacy budget does not hold another round"
    assert random.normals == [5.0]
    assert ledger.charges() == []


def test_what_others_are_told_does_not_depend_on_the_count(ledger: Ledger) -> None:
    texts = set()
    for number, units in enumerate((0, 3, 61)):
        with pytest.raises(PrivacyError) as error:
            require_enough_units(
                units,
                min_samples=100,
                round_name=f"f/{number}",
                plan_digest=PLAN,
                privacy=LAW.model_copy(update={"epsilon_total": 100.0}),
                ledger=ledger,
                random=Drawn(0.0),
                now_s=1.0,
            )
        texts.add(error.value.public)
        assert f"{units} units, fewer than min_samples = 100" in str(error.value)
    assert texts == {PUBLIC}
