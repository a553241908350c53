"""Proximal policy optimisation on logged answers, decoupled from the policy that served them.

Schulman et al. 2017, arXiv:1707.06347, with the proximal policy separated from the
behaviour policy as in Hilton et al. 2022, arXiv:2110.00641: the trust region is
around the adapter the round started from, and a truncated importance weight
corrects for the version that really served the answer. Negative advantages are
bounded a second time (dual clip, Ye et al. 2020, arXiv:1912.09729). The KL term
is Schulman's k3 estimate to the round's start.

The advantage is the answer's own reward minus a public baseline, or generalised
advantage estimation (Schulman et al. 2015, arXiv:1506.02438) with a value head
that is trained inside the same clipped gradient. Nothing is whitened: a mean or
deviation over the batch would let one answer move all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_node.training.objectives.rows import Rows, ratio


def ppo_losses(
    rows: Rows,
    *,
    baseline: float,
    advantage_limit: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    importance_cap: float,
    kl_weight: float,
    value_weight: float,
    gae_lambda: float,
) -> Tensor:
    """Mean clipped surrogate over an answer's own tokens, [E].

    Args:
        baseline: public; subtracted from the reward where there is no value head.
        advantage_limit: advantages are clipped to ± this.
        dual_clip: with a negative advantage A the surrogate is at least dual_clip · A.
        importance_cap: largest importance weight of a token.
        value_weight: of ½(value − return)²; 0 for no value head.
    """
    value_loss_E11: Tensor | float = 0.0
    if rows.values_ERK is None:
        advantage_ERK = (rows.rewards_ER - baseline)[..., None].expand_as(rows.logps_ERK)
    else:
        advantage_ERK = generalised_advantages(rows.values_ERK.detach(), rows, gae_lambda=gae_lambda)
        return_ERK = advantage_ERK + rows.values_ERK.detach()
        value_loss_E11 = value_weight * 0.5 * (rows.values_ERK - return_ERK) ** 2
    surrogate_ERK = clipped_surrogate(
        rows,
        advantage_ERK.clamp(-advantage_limit, advantage_limit),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        importance_cap=importance_cap,
    )
    per_token_ERK = -surrogate_ERK + kl_weight * kl_to_start(rows) + value_loss_E11
    return rows.own_mean_ER(per_token_ERK)[:, 0]


def sequence_ppo_losses(
    rows: Rows, *, baseline: float, advantage_limit: float, clip_low: float, clip_high: float
) -> Tensor:
    """The surrogate with one ratio for the whole answer, as RLOO trains (Ahmadian et al. 2024, arXiv:2402.14740), [E].

    The ratio is to the behaviour policy itself: an importance weight of a whole answer varies too much to help.
    """
    log_ratio_ER = ((rows.logps_ERK - rows.behaviour_logps_ERK) * rows.written_ERK).sum(-1)
    ratio_E = ratio(log_ratio_ER)[:, 0]
    advantage_E = (rows.rewards_ER[:, 0] - baseline).clamp(-advantage_limit, advantage_limit)
    clipped_E = ratio_E.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_E * advantage_E, clipped_E * advantage_E)


def clipped_surrogate(
    rows: Rows, advantage_ERK: Tensor, *, clip_low: float, clip_high: float, dual_clip: float, importance_cap: float
) -> Tensor:
    """Importance-weighted clipped surrogate of each token, [E, R, K]; larger is better."""
    weight_ERK = ratio(rows.start_logps_ERK - rows.behaviour_logps_ERK).clamp(max=importance_cap)
    ratio_ERK = ratio(rows.logps_ERK - rows.start_logps_ERK)
    clipped_ERK = ratio_ERK.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate_ERK = torch.minimum(ratio_ERK * advantage_ERK, clipped_ERK * advantage_ERK)
    bounded_ERK = torch.maximum(surrogate_ERK, dual_clip * advantage_ERK)
    return weight_ERK * torch.where(advantage_ERK < 0, bounded_ERK, surrogate_ERK)


def kl_to_start(rows: Rows) -> Tensor:
    """Schulman's k3 estimate of the divergence from the round's start, per token, [E, R, K]."""
    difference_ERK = rows.start_logps_ERK - rows.logps_ERK
    return ratio(difference_ERK) - difference_ERK - 1.0


def generalised_advantages(values_ERK: Tensor, rows: Rows, *, gae_lambda: float) -> Tensor:
    """Advantages of each written token with the reward at the last one and no discount, [E, R, K]."""
    written_ERK = rows.written_ERK > 0
    advantages_ERK = torch.zeros_like(values_ERK)
    next_value_ER = torch.zeros_like(rows.rewards_ER)
    next_advantage_ER = torch.zeros_like(rows.rewards_ER)
    reward_ER = rows.rewards_ER
    for k in reversed(range(values_ERK.shape[-1])):
        here_ER = written_ERK[..., k]
        advantage_ER = reward_ER + next_value_ER - values_ERK[..., k] + gae_lambda * next_advantage_ER
        advantages_ERK[..., k] = torch.where(here_ER, advantage_ER, 0.0)
        next_advantage_ER = torch.where(here_ER, advantage_ER, next_advantage_ER)
        next_value_ER = torch.where(here_ER, values_ERK[..., k], next_value_ER)
        reward_ER = torch.where(here_ER, 0.0, reward_ER)
    return advantages_ERK
