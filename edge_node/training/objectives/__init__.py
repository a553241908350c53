"""Objectives: what one unit's gradient is the gradient of.

Each file is one method and gives a loss per example that depends on nothing but
that example and public constants; that is what clipping per unit relies on, and
what `tests/contracts/test_objectives.py` attacks. A new objective is a new file
and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from common.errors import PrivacyError
from edge_node.training.objectives.bco import bco_losses
from edge_node.training.objectives.dpo import dpo_losses, ipo_losses
from edge_node.training.objectives.grpo import grpo_losses
from edge_node.training.objectives.ppo import ppo_losses, sequence_ppo_losses
from edge_node.training.objectives.rft import rft_losses
from edge_node.training.units import ExampleKind

GROUP_SIZE = "group_size"
"""Hyper-parameter of group objectives that shapes the examples instead of the loss."""


@dataclass(frozen=True)
class Objective:
    """One entry of OBJECTIVES.

    Attributes:
        losses: takes `Rows` and the hyper-parameters by name; one loss per example.
        kind: the examples it learns from.
        hyperparameters: public constants with their defaults; a plan may set these and no others, within LIMITS.
        off_policy: whether it needs the log-probabilities recorded when an answer was served.
        uses_start: whether it needs log-probabilities under the adapter the round starts from.
    """

    losses: Callable[..., Tensor]
    kind: ExampleKind
    hyperparameters: Mapping[str, float]
    off_policy: bool = False
    uses_start: bool = True

    @property
    def answers(self) -> int:
        """Answers of one example, with the default hyper-parameters."""
        return {"pairs": 2, "groups": int(self.hyperparameters.get(GROUP_SIZE, 1))}.get(self.kind, 1)

    def of_loss(self, hyperparameters: Mapping[str, float]) -> dict[str, float]:
        """Those that the loss takes; the others shape the examples."""
        return {name: value for name, value in hyperparameters.items() if name != GROUP_SIZE}


LIMITS: Mapping[str, tuple[float, float]] = {
    "beta": (1e-4, 1e3),
    "clip_low": (0.0, 1.0),
    "clip_high": (0.0, 1e3),
    "dual_clip": (1.0, 1e3),
    "importance_cap": (1e-3, 1e3),
    "advantage_limit": (1e-3, 1e3),
    "gae_lambda": (0.0, 1.0),
    GROUP_SIZE: (2.0, 64.0),
}
"""Smallest and largest value by name. A value that fails in arithmetic would fail only where there are records."""

_ANY = (-1e3, 1e3)

_SURROGATE = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "importance_cap": 2.0, "kl_weight": 0.02}

OBJECTIVES: Mapping[str, Objective] = {
    "dpo": Objective(dpo_losses, "pairs", {"beta": 0.1}),
    "ipo": Objective(ipo_losses, "pairs", {"beta": 0.1}),
    "rft": Objective(rft_losses, "answers", {"threshold": 0.75}, uses_start=False),
    "bco": Objective(
        bco_losses, "thumbs", {"beta": 0.1, "shift": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    ),
    "ppo": Objective(
        ppo_losses,
        "answers",
        {**_SURROGATE, "baseline": 0.5, "advantage_limit": 3.0, "value_weight": 0.0, "gae_lambda": 0.95},
        off_policy=True,
    ),
    "ppo-sequence": Objective(
        sequence_ppo_losses,
        "answers",
        {"baseline": 0.5, "advantage_limit": 3.0, "clip_low": 0.2, "clip_high": 0.2},
        off_policy=True,
    ),
    "grpo": Objective(grpo_losses, "groups", {**_SURROGATE, GROUP_SIZE: 4.0}, off_policy=True),
}
"""Objective name in a round plan to its method."""


def objective_of(name: str, hyperparameters: Mapping[str, float]) -> tuple[Objective, dict[str, float]]:
    """The objective with all its hyper-parameters, those of the plan before the defaults.

    Raises:
        PrivacyError: it does not exist, or a hyper-parameter does not.
    """
    if name not in OBJECTIVES:
        raise PrivacyError(
            f"the plan asks for objective {name!r}; this site knows {', '.join(sorted(OBJECTIVES))}",
            public="the plan asks for an objective this site does not know",
        )
    objective = OBJECTIVES[name]
    unknown = sorted(set(hyperparameters) - set(objective.hyperparameters))
    if unknown:
        raise PrivacyError(
            f"objective {name} has no hyper-parameter {unknown[0]!r}; it has "
            + ", ".join(sorted(objective.hyperparameters)),
            public="the plan sets a hyper-parameter its objective does not have",
        )
    for key, value in hyperparameters.items():
        low, high = LIMITS.get(key, _ANY)
        if not low <= value <= high or (key == GROUP_SIZE and value != int(value)):
            raise PrivacyError(
                f"the plan sets {key} = {value:g}; it must be within {low:g} and {high:g}",
                public="the plan sets a hyper-parameter outside its limits",
            )
    return objective, {**objective.hyperparameters, **hyperparameters}
