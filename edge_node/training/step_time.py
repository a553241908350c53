"""How long one unit takes on this machine, measured on public synthetic examples."""

from __future__ import annotations

import time

from edge_node.training.batch import PassLimit, Term
from edge_node.training.lora_model import LoraModel
from edge_node.training.objectives import Objective, objective_of
from edge_node.training.trainer import ENGINES, Losses
from edge_node.training.units import Answer

_UNITS = 8


def seconds_per_unit(
    model: LoraModel,
    objective: str,
    *,
    limit: PassLimit,
    engine: str = "flat",
    prompt_tokens: int = 64,
    completion_tokens: int = 64,
) -> float:
    """Seconds of one unit's gradient; the model must have an adapter loaded."""
    method, values = objective_of(objective, {})
    losses = Losses(model, method, values, pad_id=0)
    gradients = ENGINES[engine](model.peft_model, limit=limit, loss_scale=model.loss_scale).gradients
    terms = synthetic_terms(method, _UNITS, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    times = []
    for _ in range(2):  # the first also warms up
        started = time.perf_counter()
        list(gradients(terms, _UNITS, losses))
        times.append(time.perf_counter() - started)
    return min(times) / _UNITS


def synthetic_terms(objective: Objective, units: int, *, prompt_tokens: int, completion_tokens: int) -> list[Term]:
    """Units of one repeated token in the shape an objective takes; what they say does not matter for time."""
    answer = Answer(
        (1,) * prompt_tokens, (1,) * completion_tokens, (True,) * completion_tokens, (-1.0,) * completion_tokens
    )
    return [Term((answer,) * objective.answers, unit) for unit in range(units)]
