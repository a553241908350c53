"""Binary classifier optimisation for unpaired thumbs.

Jung et al. 2024, arXiv:2404.04656, with the reward shift δ as a public constant of
the plan: the paper's running mean over the batch, like KTO's reference point, would
make each answer's loss depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from edge_node.training.objectives.rows import Rows


def bco_losses(rows: Rows, *, beta: float, shift: float, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """-w± · log σ(±(β · log-ratio − shift)), + where the reward is positive, [E]."""
    log_ratio_E = (rows.summed_logps_ER - rows.summed_start_logps_ER)[:, 0]
    up_E = rows.rewards_ER[:, 0] > 0
    sign_E = torch.where(up_E, 1.0, -1.0)
    weight_E = torch.where(up_E, desirable_weight, undesirable_weight)
    return -weight_E * functional.logsigmoid(sign_E * (beta * log_ratio_E - shift))
