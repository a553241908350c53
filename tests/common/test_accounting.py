"""Figures from Opacus' PRV against values published by Google's PLD accountant."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common import accounting
from common.accounting import PrivateSteps, epsilon, merged, noise_multiplier_for
from common.errors import PrivacyError

DELTA = 1e-5

# (q, σ, steps, ε by Google's dp-accounting 0.6.0, PLD, add/remove)
GOOGLE_PLD = [(0.125, 1.0, 40, 5.788), (0.2, 2.0, 100, 5.023), (1.0, 5.0, 20, 3.849), (0.0064, 1.0, 1560, 1.398)]


@pytest.mark.parametrize(("rate", "sigma", "steps", "published"), GOOGLE_PLD)
def test_epsilon_is_googles_within_the_accountants_error(
    rate: float, sigma: float, steps: int, published: float
) -> None:
    found = epsilon([PrivateSteps(sigma, rate, steps)], delta=DELTA)
    assert published - 0.002 <= found <= published + 0.03


def test_nothing_costs_nothing() -> None:
    assert epsilon([], delta=DELTA) == 0.0


def test_events_compose_as_one_longer_event() -> None:
    parts = [PrivateSteps(1.0, 0.1, 10)] * 3
    assert epsilon(parts, delta=DELTA) == epsilon([PrivateSteps(1.0, 0.1, 30)], delta=DELTA)


def test_where_prv_fails_the_upper_bound_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> float:
        raise OverflowError

    event = PrivateSteps(1.1, 0.2, 17)
    tight = epsilon([event], delta=DELTA)
    accounting._epsilon.cache_clear()
    monkeypatch.setattr(accounting.PRVAccountant, "get_epsilon", broken)
    assert epsilon([event], delta=DELTA) > tight
    accounting._epsilon.cache_clear()


@pytest.mark.parametrize(("target", "rate", "steps"), [(8.0, 0.5, 10), (1.0, 0.1, 4), (3.0, 1.0, 6)])
def test_the_solved_noise_keeps_the_budget_and_little_less_does_not(target: float, rate: float, steps: int) -> None:
    sigma = noise_multiplier_for(target_epsilon=target, delta=DELTA, sampling_rate=rate, steps=steps)
    assert epsilon([PrivateSteps(sigma, rate, steps)], delta=DELTA) <= target
    assert epsilon([PrivateSteps(sigma * 0.97, rate, steps)], delta=DELTA) > target * 0.98


BESIDE = (10.0, 1.0, 5)


@pytest.mark.parametrize(("target", "rate", "steps"), [(8.0, 0.5, 10), (1.5, 1.0, 6)])
def test_noise_solved_beside_another_mechanism_keeps_the_budget_of_both(target: float, rate: float, steps: int) -> None:
    def of(*besides: tuple[float, float, int]) -> float:
        return noise_multiplier_for(
            target_epsilon=target, delta=DELTA, sampling_rate=rate, steps=steps, besides=tuple(besides)
        )

    sigma = of(BESIDE)
    assert epsilon([PrivateSteps(sigma, rate, steps), PrivateSteps(*BESIDE)], delta=DELTA) <= target
    assert epsilon([PrivateSteps(sigma - 0.004, rate, steps), PrivateSteps(*BESIDE)], delta=DELTA) > target
    assert of() < sigma


def test_mechanisms_that_spend_everything_leave_no_noise_to_solve() -> None:
    with pytest.raises(PrivacyError, match=r"beside \(\(1.0, 1.0, 5\),\); raise epsilon or plan fewer rounds"):
        noise_multiplier_for(target_epsilon=2.0, delta=DELTA, sampling_rate=1.0, steps=1, besides=((1.0, 1.0, 5),))


@given(least=st.integers(1, 5000), slope=st.floats(0.3, 4.0), floor=st.floats(0.0, 0.95), high=st.integers(1, 10_000))
def test_the_search_finds_the_smallest_with_few_figures(least: int, slope: float, floor: float, high: int) -> None:
    asked = []

    def spent(k: int) -> float:
        asked.append(k)
        return floor + (1 - floor) * (least / k) ** slope

    assume(high >= least)
    assert accounting._smallest(spent, high, 1.0) == least
    assert len(asked) <= 2 + 3 * math.log2(high + 1)


def test_more_noise_never_costs_more_also_where_the_accountant_changes() -> None:
    spent = [epsilon([PrivateSteps(sigma, 1.0, 4)], delta=DELTA) for sigma in (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6)]
    assert all(map(math.isfinite, spent))
    assert spent == sorted(spent, reverse=True)
    assert spent[0] > accounting._PRV_UP_TO_EPSILON > spent[-1]


def test_equal_mechanisms_are_merged_in_one_order() -> None:
    one, two = PrivateSteps(1.0, 0.1, 3), PrivateSteps(2.0, 0.1, 4)
    assert merged([two, one, two]) == merged([one, two, two]) == ((1.0, 0.1, 3), (2.0, 0.1, 8))


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(0.0, 0.1, 1), (float("nan"), 0.1, 1), (1.0, 0.0, 1), (1.0, 1.1, 1), (1.0, 0.1, 0)]
)
def test_events_that_mean_nothing_are_refused(sigma: float, rate: float, steps: int) -> None:
    with pytest.raises(PrivacyError):
        PrivateSteps(sigma, rate, steps)
