"""What an objective sees of a batch: log-probabilities, masks and rewards, one example per leading index.

Axes: E examples, R answers of an example (2 of a pair, G of a group, else 1), K
completion tokens counted from the first of each answer. `written` is 1 where the
model wrote the token; everything else is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Ratios of probabilities are bounded by e²⁰: beyond it an exponential overflows and its gradient is not a number."""


def ratio(log_ratio: Tensor) -> Tensor:
    """exp, bounded."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


@dataclass(frozen=True)
class Rows:
    """One batch; everything but `logps_ERK` and `values_ERK` is constant.

    Attributes:
        logps_ERK: log-probability of each token under the weights that are trained.
        start_logps_ERK: under the adapter the round started from; public weights, so free of charge.
        behaviour_logps_ERK: as recorded when the answer was served; 0 where not recorded.
        values_ERK: predictions of the value head, where the objective has one.
    """

    logps_ERK: Tensor
    start_logps_ERK: Tensor
    behaviour_logps_ERK: Tensor
    written_ERK: Tensor
    rewards_ER: Tensor
    values_ERK: Tensor | None = None

    @property
    def summed_logps_ER(self) -> Tensor:
        return (self.logps_ERK * self.written_ERK).sum(-1)

    @property
    def summed_start_logps_ER(self) -> Tensor:
        return (self.start_logps_ERK * self.written_ERK).sum(-1)

    def own_mean_ER(self, per_token_ERK: Tensor) -> Tensor:
        """Mean over each answer's own written tokens; never over the batch, which would couple units."""
        written = self.written_ERK
        return torch.where(written > 0, per_token_ERK, 0.0).sum(-1) / written.sum(-1).clamp(min=1.0)
