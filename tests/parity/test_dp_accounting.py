"""Every figure the ledger refuses by, against Google's privacy loss distributions."""

from __future__ import annotations

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from common.accounting import PrivateSteps, epsilon, noise_multiplier_for

PRV_ERROR = 0.01
"""Of Opacus' PRV, which reports its upper end."""

PLD_INTERVAL = 1e-4


def google(events: list[PrivateSteps], delta: float) -> float:
    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=PLD_INTERVAL
    )
    for event in events:
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian), event.steps)
    return float(accountant.get_epsilon(delta))


READINESS = PrivateSteps(10.0, 1.0, 5)
SETTINGS = [
    pytest.param(1e-5, [PrivateSteps(2.0, 0.5, 10)], id="few large batches"),
    pytest.param(1e-5, [PrivateSteps(1.0, 0.01, 2000)], id="many small batches"),
    pytest.param(1e-6, [PrivateSteps(0.8, 0.064, 60)], id="little noise"),
    pytest.param(1e-5, [PrivateSteps(1.0, 1.0, 1)], id="one count"),
    pytest.param(1e-5, [PrivateSteps(20.0, 0.5, 1000)], id="much noise"),
    pytest.param(1e-7, [PrivateSteps(4.0, 1.0, 16)], id="whole batches"),
    pytest.param(1e-5, [PrivateSteps(2.0, 0.5, 10), READINESS], id="training and readiness"),
    pytest.param(1e-5, [PrivateSteps(1.2, 0.05, 101), READINESS, PrivateSteps(3.0, 0.3, 13)], id="three mechanisms"),
]


@pytest.mark.parametrize(("delta", "events"), SETTINGS)
def test_epsilon_is_googles_to_two_hundredths_and_never_below_it(delta: float, events: list[PrivateSteps]) -> None:
    theirs = google(events, delta)
    assert theirs - 2 * PLD_INTERVAL <= epsilon(events, delta=delta) <= theirs + 0.02


def test_noise_solved_beside_readiness_keeps_the_budget_by_googles_figure() -> None:
    sigma = noise_multiplier_for(target_epsilon=8.0, delta=1e-5, sampling_rate=0.5, steps=10, besides=((10.0, 1.0, 5),))
    assert 8.0 - 0.05 <= google([PrivateSteps(sigma, 0.5, 10), READINESS], 1e-5) <= 8.0
