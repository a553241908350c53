"""Group-relative policy optimisation, one loss per group of answers to one request.

Shao et al. 2024, arXiv:2402.03300. The whole group is one privacy unit, so its
answers may be compared with each other; nothing is normalised over the batch.
"""

from __future__ import annotations

from torch import Tensor

from edge_node.training.objectives.ppo import clipped_surrogate, kl_to_start
from edge_node.training.objectives.rows import Rows

_SMALLEST_DEVIATION = 1e-4


def grpo_losses(
    rows: Rows, *, clip_low: float, clip_high: float, dual_clip: float, importance_cap: float, kl_weight: float
) -> Tensor:
    """Mean over a group's answers of the clipped surrogate, advantages relative to the group, [E]."""
    rewards_ER = rows.rewards_ER
    centred_ER = rewards_ER - rewards_ER.mean(1, keepdim=True)
    advantage_ER = centred_ER / (rewards_ER.std(1, keepdim=True) + _SMALLEST_DEVIATION)
    surrogate_ERK = clipped_surrogate(
        rows,
        advantage_ER[..., None].expand_as(rows.logps_ERK),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        importance_cap=importance_cap,
    )
    return rows.own_mean_ER(-surrogate_ERK + kl_weight * kl_to_start(rows)).mean(1)
