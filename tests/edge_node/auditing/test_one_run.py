"""The lower bound of Steinke, Nasr & Jagielski: valid, tight where it can be, and sharp enough for gross bugs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from common.accounting import PrivateSteps
from edge_node.auditing.mechanism import AuditedMechanism
from edge_node.auditing.one_run import (
    CONFIDENCE,
    affordable_canaries,
    ceiling,
    epsilon_lower_bound,
    lower_bound_of,
    one_run_canaries,
    p_value,
    right_guesses,
)


def randomised_response(epsilon: float, delta: float, canaries: int, rng: np.random.Generator) -> int:
    """Right guesses about coins that an exactly (ε, δ)-DP mechanism shows: the truth with probability δ,
    else the truth with probability e^ε / (1 + e^ε)."""
    true_V = (rng.random(canaries) < 1 / (1 + math.exp(-epsilon))) | (rng.random(canaries) < delta)
    return int(true_V.sum())


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_bound_is_below_the_truth_in_95_of_100_runs(epsilon: float, delta: float) -> None:
    rng = np.random.default_rng(1)
    runs, canaries = 1000, 200
    rights = [randomised_response(epsilon, delta, canaries, rng) for _ in range(runs)]
    p_values = {v: p_value(right=v, guesses=canaries, canaries=canaries, epsilon=epsilon, delta=delta) for v in rights}
    refuted = sum(p_values[v] < 1 - CONFIDENCE for v in rights)
    assert stats.binom.sf(refuted - 1, runs, 1 - CONFIDENCE) > 1e-4, f"{refuted} of {runs} refute the truth"
    bounds = [
        epsilon_lower_bound(right=v, guesses=canaries, canaries=canaries, delta=delta, confidence=CONFIDENCE)
        for v in rights[:100]
    ]
    assert sum(bound > epsilon for bound in bounds) <= 15


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_the_bound_comes_close_with_many_canaries(epsilon: float) -> None:
    rng = np.random.default_rng(2)
    canaries = 100_000
    right = randomised_response(epsilon, 0.0, canaries, rng)
    bound = epsilon_lower_bound(right=right, guesses=canaries, canaries=canaries, delta=0.0, confidence=CONFIDENCE)
    assert 0.95 * epsilon < bound < 1.03 * epsilon


def test_without_delta_the_p_value_is_the_binomial_test() -> None:
    for right, guesses in ((60, 100), (100, 100), (990, 1000)):
        for epsilon in (0.0, 0.4, 3.0):
            exact = stats.binomtest(right, guesses, 1 / (1 + math.exp(-epsilon)), alternative="greater").pvalue
            found = p_value(right=right, guesses=guesses, canaries=2000, epsilon=epsilon, delta=0.0)
            assert found == pytest.approx(exact, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_p_value_is_the_papers_formula_and_monotone(data: st.DataObject) -> None:
    canaries = data.draw(st.integers(1, 60))
    guesses = data.draw(st.integers(1, canaries))
    right = data.draw(st.integers(1, guesses))
    epsilon = data.draw(st.floats(0, 6))
    delta = data.draw(st.floats(0, 0.01))
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    chance = [math.comb(guesses, k) * accuracy**k * (1 - accuracy) ** (guesses - k) for k in range(guesses + 1)]
    alpha = max(sum(chance[right - i : right]) / i for i in range(1, right + 1))
    expected = min(1.0, sum(chance[right:]) + 2 * canaries * delta * alpha)

    def found(**changed: float) -> float:
        given = {"right": right, "guesses": guesses, "canaries": canaries, "epsilon": epsilon, "delta": delta}
        return p_value(**{**given, **changed})  # type: ignore[arg-type]

    assert found() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert found(delta=delta + 0.01) >= found()
    assert found(canaries=canaries + 5) >= found()
    assert found(delta=0.0, epsilon=epsilon + 0.5) >= found(delta=0.0) - 1e-12


def test_impossible_counts_are_refused() -> None:
    for right, guesses, canaries in ((2, 1, 1), (1, 2, 1), (-1, 2, 2)):
        with pytest.raises(ValueError, match="not possible"):
            p_value(right=right, guesses=guesses, canaries=canaries, epsilon=1.0, delta=0.0)


def test_guesses_call_the_highest_in_and_the_lowest_out() -> None:
    scores = np.array([0.1, 5.0, -3.0, 2.0])
    included = np.array([True, True, False, False])
    assert right_guesses(scores, included, 2) == 2
    assert right_guesses(scores, included, 1) == 1
    assert right_guesses(scores, included, 4) == 2
    assert right_guesses(-scores, included, 2) == 0


def test_scores_without_information_give_no_bound() -> None:
    rng = np.random.default_rng(3)
    bounds = [lower_bound_of(rng.random(500), rng.random(500) < 0.5, delta=1e-5) for _ in range(60)]
    assert sum(bound > 0 for bound in bounds) <= 9
    assert ceiling(500, delta=1e-5) > 3


def test_the_mechanism_as_it_is_stays_below_its_claim_and_above_nothing(mechanism: AuditedMechanism) -> None:
    check = one_run_canaries(mechanism, canaries=1000, coins=np.random.default_rng())
    assert check.passed
    assert all(figure.high is not None and 0.2 < figure.value < 0.7 * figure.high for figure in check.figures)


def test_noise_an_eighth_of_what_is_claimed_is_proven(
    mechanism: AuditedMechanism, noise_divided_by: Callable[[float], None]
) -> None:
    noise_divided_by(8)
    assert not one_run_canaries(mechanism, canaries=1000, coins=np.random.default_rng()).passed


def test_a_clip_four_times_too_wide_is_proven(
    mechanism: AuditedMechanism, clip_four_times_too_wide: Callable[[], None]
) -> None:
    clip_four_times_too_wide()
    assert not one_run_canaries(mechanism, canaries=1000, coins=np.random.default_rng()).passed


def test_half_the_noise_is_not_seen_here_as_the_text_says(
    mechanism: AuditedMechanism, noise_divided_by: Callable[[float], None]
) -> None:
    noise_divided_by(2)
    check = one_run_canaries(mechanism, canaries=1000, coins=np.random.default_rng())
    assert check.passed
    assert "half the size passes" in check.not_proven


def test_long_runs_get_fewer_canaries() -> None:
    assert affordable_canaries(PrivateSteps(1.0, 0.5, 10), most=5000) == 5000
    long = affordable_canaries(PrivateSteps(1.0, 0.5, 1000), most=5000)
    assert 200 < long < 5000
    assert 1000 * 0.5 * long**2 / 2 < 2e9
    assert affordable_canaries(PrivateSteps(1.0, 1.0, 10_000_000), most=5000) == 200
