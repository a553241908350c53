"""Whether the log-probabilities recorded with an answer can carry an importance weight."""

from __future__ import annotations

import torch

from edge_node.training.batch import Term
from edge_node.training.units import Answer, Unit

LARGEST_MISMATCH_NATS = 0.2
"""Mean difference per token between serving and training on the same weights; more means they disagree."""

SMALLEST_EFFECTIVE_SHARE = 0.3
"""Of an answer's tokens, by the effective sample size of its importance weights."""


def with_behaviour_logps(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The units all of whose answers were recorded with log-probabilities."""
    return tuple(
        unit for unit in units if all(answer.behaviour_logps for example in unit.examples for answer in example)
    )


def is_trusted(term: Term, *, start_digest: str) -> bool:
    """Whether every answer of an example agrees with what training computes; a rule on the record alone."""
    assert term.start_logps is not None
    return all(
        _agrees(answer, start, start_digest) for answer, start in zip(term.example, term.start_logps, strict=True)
    )


def _agrees(answer: Answer, start_logps_K: torch.Tensor, start_digest: str) -> bool:
    written = torch.tensor(answer.written)
    log_weights = (start_logps_K - torch.tensor(answer.behaviour_logps))[written]
    if not len(log_weights) or not bool(torch.isfinite(log_weights).all()):
        return False
    if answer.adapter_digest == start_digest:
        return bool(log_weights.abs().mean() <= LARGEST_MISMATCH_NATS)
    weights = (log_weights - log_weights.max()).exp()
    effective = weights.sum() ** 2 / (weights**2).sum()
    return bool(effective / len(weights) >= SMALLEST_EFFECTIVE_SHARE)
