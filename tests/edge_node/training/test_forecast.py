"""The forecast names what a plan costs, and the smallest number of units that makes it worth it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common import accounting
from common.accounting import PrivateSteps, epsilon, noise_multiplier_for
from common.errors import PrivacyError
from common.plan import Training
from edge_node.training.forecast import NEEDED_SNR, Forecast, forecast

DELTA = 1e-5
COUNT = PrivateSteps(10.0, 1.0, 1)


@pytest.fixture(scope="module", autouse=True)
def quick_accountant() -> Iterator[None]:
    """The upper bound stands for every figure: what is tested is what the forecast makes of them."""

    def fails(*_: object, **__: object) -> float:
        raise OverflowError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting.PRVAccountant, "get_epsilon", fails)
        _forget()
        yield
    _forget()


def _forget() -> None:
    accounting._epsilon.cache_clear()
    noise_multiplier_for.cache_clear()


def of(
    units: int, rounds: int, *, rate: float = 1.0, steps: int = 2, total: float = 8.0, unit: str = "trajectory"
) -> Forecast:
    training = Training("dpo", "sgd", 30.0, steps, rate, 100.0, 0.1, {})
    return forecast(
        training,
        rounds=rounds,
        units=units,
        values=1000,
        adapter_values=2500,
        epsilon_total=total,
        delta=DELTA,
        seconds_per_unit=0.6,
        unit=unit,
        beside=[COUNT],
    )


def test_the_figures_are_those_of_the_mechanisms_that_would_run() -> None:
    found = of(400, 5, rate=0.5)
    sigma = noise_multiplier_for(
        target_epsilon=8.0, delta=DELTA, sampling_rate=0.5, steps=10, besides=((10.0, 1.0, 5),)
    )
    assert found.noise_multiplier == sigma
    assert found.epsilon_of_all_rounds == epsilon([PrivateSteps(sigma, 0.5, 2), COUNT] * 5, delta=DELTA)
    assert 7.9 < found.epsilon_of_all_rounds <= 8.0
    assert found.epsilon_of_first_round == epsilon([PrivateSteps(sigma, 0.5, 2), COUNT], delta=DELTA)
    assert found.signal_to_noise == pytest.approx(math.sqrt(10) * 0.5 * 400 / sigma)
    assert found.minutes == pytest.approx(5 * 2 * 0.5 * 400 * 0.6 / 60)
    assert (found.megabytes_up, found.megabytes_down) == (0.02, 0.05)
    assert found.refusal is None
    assert found.epsilon_needed < 8.0


def test_a_plan_that_cannot_learn_is_refused_with_the_way_out() -> None:
    found = of(60, 50)
    needed = math.ceil(found.epsilon_needed * 10) / 10
    assert needed > 8.0
    assert found.refusal is not None
    assert re.fullmatch(
        rf"60 trajectories over 50 rounds need epsilon {needed:g} to learn anything, the policy allows 8; "
        r"at least \d+ trajectories are needed, or fewer rounds",
        found.refusal,
    )
    assert of(60, 1, steps=1, unit="user", total=1.0).refusal.startswith("60 users over 1 rounds")  # type: ignore[union-attr]


def test_the_epsilon_it_names_is_what_the_weakest_noise_that_learns_costs() -> None:
    found = of(60, 50)
    sigma = math.sqrt(100) * 60 / NEEDED_SNR
    assert found.epsilon_needed == epsilon([PrivateSteps(sigma, 1.0, 100), *[COUNT] * 50], delta=DELTA)
    assert of(60, 50, total=found.epsilon_needed + 0.01).refusal is None
    assert of(60, 50, total=found.epsilon_needed - 0.01).refusal is not None


def least(refusal: str) -> int:
    found = re.search(r"at least (\d+) ", refusal)
    assert found is not None
    return int(found[1])


@settings(max_examples=30, deadline=None)
@given(
    rounds=st.integers(1, 60),
    steps=st.integers(1, 8),
    units=st.integers(0, 40),
    total=st.sampled_from([2.5, 4.0, 8.0]),
    rate=st.sampled_from([1.0, 0.25, 0.005]),
)
def test_the_number_it_names_passes_and_one_less_does_not(
    rounds: int, steps: int, units: int, total: float, rate: float
) -> None:
    try:
        found = of(units, rounds, steps=steps, total=total, rate=rate)
    except PrivacyError:
        assume(False)
    if found.refusal is None:
        assert units > 0
        return
    named = least(found.refusal)
    assert named > units
    assert of(named, rounds, steps=steps, total=total, rate=rate).refusal is None
    below = of(named - 1, rounds, steps=steps, total=total, rate=rate)
    assert below.refusal is not None
    assert least(below.refusal) == named


def test_fewer_rounds_need_less_epsilon_where_steps_are_alike() -> None:
    few, many = of(60, 5, steps=2), of(60, 50, steps=20)
    assert few.noise_multiplier < many.noise_multiplier
    assert of(0, 3).refusal is not None
    assert of(0, 3).signal_to_noise == 0.0


def test_a_budget_that_the_other_mechanisms_exhaust_is_an_error() -> None:
    with pytest.raises(PrivacyError, match="raise epsilon or plan fewer rounds"):
        of(100, 50, total=0.5)
