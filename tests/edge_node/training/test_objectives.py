"""Objectives against their formulas, worked by hand or by numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from common.errors import PrivacyError
from edge_node.training.objectives import objective_of
from edge_node.training.objectives.ppo import generalised_advantages
from edge_node.training.objectives.rows import Rows


def rows(
    logps: list[list[float]],
    *,
    start: list[list[float]] | None = None,
    behaviour: list[list[float]] | None = None,
    written: list[list[float]] | None = None,
    rewards: list[float] | None = None,
    answers: int = 1,
) -> Rows:
    def shaped(values: list[list[float]] | None, default: float) -> torch.Tensor:
        tensor = torch.full((len(logps), len(logps[0])), default) if values is None else torch.tensor(values)
        return tensor.view(-1, answers, tensor.shape[1])

    return Rows(
        shaped(logps, 0.0),
        shaped(start, 0.0),
        shaped(behaviour if behaviour is not None else start, 0.0),
        shaped(written, 1.0),
        torch.tensor(rewards or [0.0] * len(logps)).view(-1, answers),
    )


def loss(name: str, batch: Rows, **changes: float) -> torch.Tensor:
    objective, values = objective_of(name, changes)
    return objective.losses(batch, **objective.of_loss(values))


def test_dpo_and_ipo() -> None:
    batch = rows([[-1.0, -2.0], [-2.0, -3.0]], start=[[-1.5, -2.5], [-2.0, -2.0]], answers=2)
    margin = (-3.0 - -4.0) - (-5.0 - -4.0)
    assert loss("dpo", batch, beta=0.3).item() == pytest.approx(-math.log(1 / (1 + math.exp(-0.3 * margin))), rel=1e-6)
    assert loss("ipo", batch, beta=0.3).item() == pytest.approx((margin / 2 - 1 / 0.6) ** 2, rel=1e-6)


def test_rft_learns_from_good_answers_only() -> None:
    batch = rows([[-1.0, -2.0, -9.0], [-1.0, -2.0, -3.0]], written=[[1.0, 1.0, 0.0], [1.0] * 3], rewards=[0.8, 0.7])
    assert loss("rft", batch, threshold=0.75).tolist() == [1.5, 0.0]


def test_bco() -> None:
    batch = rows([[-1.0], [-1.0]], start=[[-2.0], [-2.0]], rewards=[1.0, -1.0])
    found = loss("bco", batch, beta=0.5, shift=0.2, desirable_weight=1.0, undesirable_weight=2.0)
    z = 0.5 * 1.0 - 0.2
    expected = [math.log1p(math.exp(-z)), 2 * math.log1p(math.exp(z))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


PLAIN = {"baseline": 0.0, "advantage_limit": 10.0, "kl_weight": 0.0, "importance_cap": 2.0}


@pytest.mark.parametrize(
    ("ratio", "reward", "expected"),
    [(1.1, 1.0, 1.1), (1.5, 1.0, 1.2), (0.5, 1.0, 0.5), (0.5, -1.0, -0.8), (1.5, -1.0, -1.5), (9.0, -1.0, -3.0)],
)
def test_ppo_clips_on_the_pessimistic_side_and_twice_where_the_advantage_is_negative(
    ratio: float, reward: float, expected: float
) -> None:
    batch = rows([[math.log(ratio) - 2.0]], start=[[-2.0]], rewards=[reward])
    assert -loss("ppo", batch, **PLAIN).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("gap", "weight"), [(0.0, 1.0), (0.5, math.exp(0.5)), (3.0, 2.0), (-1.0, math.exp(-1.0))])
def test_ppo_corrects_for_the_version_that_served_with_a_truncated_weight(gap: float, weight: float) -> None:
    batch = rows([[-2.0]], start=[[-2.0]], behaviour=[[-2.0 - gap]], rewards=[1.0])
    assert -loss("ppo", batch, **PLAIN).item() == pytest.approx(weight, rel=1e-5)


def test_ppo_kl_baseline_and_advantage_limit() -> None:
    batch = rows([[-1.0, -1.0]], start=[[-1.5, -1.0]], rewards=[7.0])
    quiet = {**PLAIN, "clip_high": 10.0, "advantage_limit": 3.0, "baseline": 1.0}
    kl = (math.exp(-0.5) + 0.5 - 1) / 2
    expected = -3.0 * (math.exp(0.5) + 1) / 2 + 0.1 * kl
    assert loss("ppo", batch, **{**quiet, "kl_weight": 0.1}).item() == pytest.approx(expected, rel=1e-5)


def test_generalised_advantages_skip_what_was_not_written() -> None:
    batch = rows([[0.0] * 5], written=[[1.0, 0.0, 1.0, 1.0, 0.0]], rewards=[2.0])
    values = torch.tensor([[[0.5, 9.0, 0.2, 0.1, 9.0]]])
    third = 2.0 - 0.1
    second = 0.1 - 0.2 + 0.9 * third
    first = 0.2 - 0.5 + 0.9 * second
    found = generalised_advantages(values, batch, gae_lambda=0.9)[0, 0]
    torch.testing.assert_close(found, torch.tensor([first, 0.0, second, third, 0.0]))


def test_the_value_head_is_fitted_to_returns_and_gets_no_policy_gradient() -> None:
    base = rows([[-1.0, -1.0]], start=[[-1.0, -1.0]], rewards=[1.0])
    values = torch.tensor([[[0.3, 0.6]]], requires_grad=True)
    batch = Rows(
        base.logps_ERK, base.start_logps_ERK, base.behaviour_logps_ERK, base.written_ERK, base.rewards_ER, values
    )
    loss("ppo", batch, **{**PLAIN, "value_weight": 0.5, "gae_lambda": 1.0}).sum().backward()
    torch.testing.assert_close(values.grad, 0.5 * (values.detach() - 1.0) / 2)


def test_sequence_ppo_has_one_ratio_for_the_answer() -> None:
    batch = rows([[-1.0, -1.0]], behaviour=[[-1.05, -1.05]], rewards=[2.0])
    assert -loss("ppo-sequence", batch, baseline=0.5).item() == pytest.approx(math.exp(0.1) * 1.5, rel=1e-5)
    far = rows([[-1.0, -1.0]], behaviour=[[-3.0, -3.0]], rewards=[2.0])
    assert -loss("ppo-sequence", far, baseline=0.5).item() == pytest.approx(1.2 * 1.5, rel=1e-5)


def test_grpo_compares_answers_within_their_group() -> None:
    batch = rows([[-1.0], [-1.0], [-1.0], [-1.0]], start=[[-1.0]] * 4, rewards=[1.0, 0.0, 0.0, 0.0], answers=4)
    advantages = (np.array([1.0, 0, 0, 0]) - 0.25) / (np.std([1.0, 0, 0, 0], ddof=1) + 1e-4)
    found = loss("grpo", batch, kl_weight=0.0)
    assert found.item() == pytest.approx(-advantages.mean(), abs=1e-6)
    logps = torch.full((1, 4, 1), -1.0, requires_grad=True)
    moved = Rows(logps, batch.start_logps_ERK, batch.behaviour_logps_ERK, batch.written_ERK, batch.rewards_ER)
    loss("grpo", moved, kl_weight=0.0).sum().backward()
    np.testing.assert_allclose(logps.grad.flatten(), -advantages / 4, rtol=1e-5)


def test_unknown_objectives_and_hyperparameters_are_refused() -> None:
    with pytest.raises(PrivacyError, match=r"asks for objective 'sgd'.*bco"):
        objective_of("sgd", {})
    with pytest.raises(PrivacyError, match=r"no hyper-parameter 'gamma'; it has beta"):
        objective_of("dpo", {"gamma": 1.0})
    assert objective_of("dpo", {"beta": 0.4})[1] == {"beta": 0.4}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ipo", {"beta": 0.0}),  # would divide by zero, and only where there is a record
        ("dpo", {"beta": 1e300}),
        ("grpo", {"group_size": 1.0}),
        ("grpo", {"group_size": 2.5}),
        ("grpo", {"group_size": 1e9}),
        ("ppo", {"clip_low": 1.5}),
        ("ppo", {"baseline": 1e30}),
        ("ppo", {"gae_lambda": -0.1}),
        ("bco", {"shift": float("nan")}),
    ],
)
def test_a_hyperparameter_outside_its_limits_is_refused_whatever_the_data(name: str, changes: dict[str, float]) -> None:
    with pytest.raises(PrivacyError, match="it must be within") as error:
        objective_of(name, changes)
    assert error.value.public == "the plan sets a hyper-parameter outside its limits"
