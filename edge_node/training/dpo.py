"""Direct preference optimisation, one loss per pair.

Rafailov et al. 2023, arXiv:2305.18290, eq. 7 (sigmoid loss). Every entry is a
function of its own pair and of public state only, as per-unit clipping requires.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def dpo_losses(
    chosen_logps_U: Tensor,
    rejected_logps_U: Tensor,
    reference_chosen_logps_U: Tensor,
    reference_rejected_logps_U: Tensor,
    *,
    beta: float,
) -> Tensor:
    """-log σ(β · ((chosen − rejected) − (reference chosen − reference rejected))), [U].

    Args:
        chosen_logps_U: summed log-probabilities of each pair's preferred completion.
        beta: strength of the pull towards the reference.
    """
    margin_U = (chosen_logps_U - rejected_logps_U) - (reference_chosen_logps_U - reference_rejected_logps_U)
    return -functional.logsigmoid(beta * margin_U)
