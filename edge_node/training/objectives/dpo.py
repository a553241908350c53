"""Direct preference optimisation, one loss per (chosen, rejected) pair.

Sigmoid: Rafailov et al. 2023, arXiv:2305.18290, eq. 7. IPO: Azar et al. 2023,
arXiv:2310.12036, eq. 17, on mean log-probabilities per token as its authors use
it. The reference is the adapter the round started from.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from edge_node.training.objectives.rows import Rows


def dpo_losses(rows: Rows, *, beta: float) -> Tensor:
    """-log σ(β · ((chosen − rejected) − (reference chosen − reference rejected))), [E]."""
    change_E2 = rows.summed_logps_ER - rows.summed_start_logps_ER
    return -functional.logsigmoid(beta * (change_E2[:, 0] - change_E2[:, 1]))


def ipo_losses(rows: Rows, *, beta: float) -> Tensor:
    """(margin of the mean log-ratios − 1/(2β))², [E]."""
    change_E2 = rows.own_mean_ER(rows.logps_ERK - rows.start_logps_ERK)
    return (change_E2[:, 0] - change_E2[:, 1] - 1.0 / (2.0 * beta)) ** 2
