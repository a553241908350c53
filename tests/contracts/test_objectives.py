"""What every objective must keep: each example's loss is its own, and one unit more moves the clipped sum by at most C."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_node.training.objectives import OBJECTIVES, Objective
from edge_node.training.objectives.rows import Rows
from edge_node.training.private_step import ClippedSum

WIDTH, VOCABULARY = 6, 5
CLIP = 0.1


def random_rows(objective: Objective, examples: int, *, seed: int, scale: float) -> Rows:
    """Rows whose log-probabilities, lengths and rewards are as extreme as `scale` says."""
    generator = torch.Generator().manual_seed(seed)
    shape = (examples, objective.answers, WIDTH)

    def logps() -> torch.Tensor:
        return -(torch.rand(shape, generator=generator) * scale)

    lengths = torch.randint(1, WIDTH + 1, shape[:2], generator=generator)
    written = (torch.arange(WIDTH) < lengths[..., None]).float()
    rewards = torch.randn(shape[:2], generator=generator) * scale
    return Rows(logps(), logps(), logps(), written, rewards)


def losses(objective: Objective, rows: Rows) -> torch.Tensor:
    return objective.losses(rows, **objective.of_loss(objective.hyperparameters))


def joined(first: Rows, second: Rows) -> Rows:
    fields = ("logps_ERK", "start_logps_ERK", "behaviour_logps_ERK", "written_ERK", "rewards_ER")
    return Rows(*(torch.cat([getattr(first, name), getattr(second, name)]) for name in fields))


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 50.0]), extra_scale=st.sampled_from([1.0, 1e3, 1e6])
)
def test_an_examples_loss_does_not_depend_on_the_others(name: str, seed: int, scale: float, extra_scale: float) -> None:
    objective = OBJECTIVES[name]
    own = random_rows(objective, 3, seed=seed, scale=scale)
    others = random_rows(objective, 2, seed=seed + 1, scale=extra_scale)
    torch.testing.assert_close(losses(objective, joined(own, others))[:3], losses(objective, own), rtol=1e-6, atol=1e-7)
    assert losses(objective, own).shape == (3,)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 50.0]), extra_scale=st.sampled_from([1.0, 1e3, 1e6])
)
def test_one_unit_more_changes_the_clipped_sum_by_at_most_c(
    name: str, seed: int, scale: float, extra_scale: float
) -> None:
    """Through a small softmax model, with gradients by autograd and the product's own clipping."""
    objective = OBJECTIVES[name]
    weights = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    own = random_rows(objective, 4, seed=seed, scale=scale)
    extra = random_rows(objective, 1, seed=seed + 1, scale=extra_scale)

    def clipped_sum(rows: Rows) -> torch.Tensor:
        tokens = (torch.arange(rows.logps_ERK.numel()) % VOCABULARY).view(rows.logps_ERK.shape)
        moved = Rows(
            rows.logps_ERK.detach() + weights.log_softmax(0)[tokens],
            rows.start_logps_ERK,
            rows.behaviour_logps_ERK,
            rows.written_ERK,
            rows.rewards_ER,
        )
        per_unit = [torch.autograd.grad(loss, weights, retain_graph=True)[0] for loss in losses(objective, moved)]
        total = ClippedSum(VOCABULARY, clip_norm=CLIP, noise_multiplier=1.0)
        total.add(torch.stack(per_unit))
        return total.unsafe_release_without_noise()

    difference = torch.linalg.vector_norm(clipped_sum(joined(own, extra)) - clipped_sum(own))
    assert difference.item() <= CLIP


def batch_whitened_losses(rows: Rows) -> torch.Tensor:
    """What the contract must catch: advantages normalised over the batch."""
    reward_E = rows.rewards_ER[:, 0]
    advantage_E = (reward_E - reward_E.mean()) / (reward_E.std() + 1e-4)
    return -(advantage_E * rows.own_mean_ER(rows.logps_ERK)[:, 0])


def test_the_contract_catches_a_loss_that_couples_units() -> None:
    objective = Objective(batch_whitened_losses, "answers", {})
    own, others = (random_rows(objective, 3, seed=s, scale=3.0) for s in (1, 2))
    assert not torch.allclose(losses(objective, joined(own, others))[:3], losses(objective, own))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_the_model_did_not_write_does_not_count(name: str) -> None:
    objective = OBJECTIVES[name]
    rows = random_rows(objective, 3, seed=1, scale=2.0)
    noise = torch.randn(rows.logps_ERK.shape, generator=torch.Generator().manual_seed(9)) * (1 - rows.written_ERK)
    other = Rows(
        rows.logps_ERK + noise,
        rows.start_logps_ERK - 2 * noise,
        rows.behaviour_logps_ERK + 3 * noise,
        rows.written_ERK,
        rows.rewards_ER,
    )
    torch.testing.assert_close(losses(objective, other), losses(objective, rows))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_hyperparameters_are_finite_and_all_are_used(name: str) -> None:
    objective = OBJECTIVES[name]
    rows = random_rows(objective, 2, seed=3, scale=1.0)
    assert all(map(math.isfinite, objective.hyperparameters.values()))
    for missing in objective.of_loss(objective.hyperparameters):
        fewer = {n: v for n, v in objective.of_loss(objective.hyperparameters).items() if n != missing}
        with pytest.raises(TypeError, match=missing):
            objective.losses(rows, **fewer)
