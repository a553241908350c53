"""Rejection-sampling fine-tuning: supervised learning on the site's own good answers.

Yuan et al. 2023, arXiv:2308.01825. The threshold is a public constant: a quantile
of the site's rewards would be a release of its own. The loss is the mean over an
answer's own tokens; the usual mean over all tokens of a batch would make one
answer's weight depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_node.training.objectives.rows import Rows


def rft_losses(rows: Rows, *, threshold: float) -> Tensor:
    """Negative mean log-probability of answers whose reward reaches `threshold`, 0 of the others, [E]."""
    loss_E = -rows.own_mean_ER(rows.logps_ERK)[:, 0]
    return torch.where(rows.rewards_ER[:, 0] >= threshold, loss_E, loss_E * 0.0)
