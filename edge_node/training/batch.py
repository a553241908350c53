"""Examples to padded rows of token ids, and how many of them fit a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_node.training.units import Answer, Example


@dataclass(frozen=True)
class Term:
    """One example of a unit, as a step works on it.

    Attributes:
        unit: index of its unit within the group of units whose gradients are computed together.
        weight: 1 / examples of its unit, so that a unit's loss is the mean of its examples' losses.
        start_logps: per answer, log-probabilities of the completion under the round's start; None until known.
    """

    example: Example
    unit: int = 0
    weight: float = 1.0
    start_logps: tuple[Tensor, ...] | None = None

    @property
    def longest(self) -> int:
        return max(answer.length for answer in self.example)


@dataclass(frozen=True)
class Batch:
    """Right-padded rows, example by example; B rows of E examples with R answers each.

    Attributes:
        ids_BT: token ids.
        written_BK, behaviour_logps_BK, start_logps_BK: of the last K target tokens of the rows.
        temperature_B: of the distribution each answer was drawn from.
        shortest_prompt: what comes before the first target of any row; T − shortest_prompt = K.
    """

    ids_BT: Tensor
    written_BK: Tensor
    behaviour_logps_BK: Tensor
    start_logps_BK: Tensor
    rewards_B: Tensor
    temperature_B: Tensor
    shortest_prompt: int
    answers_per_example: int

    @property
    def examples(self) -> int:
        return len(self.ids_BT) // self.answers_per_example


@dataclass(frozen=True)
class PassLimit:
    """What one forward pass may hold; memory only, never the mechanism.

    Attributes:
        rows: answers; `tokens`: rows times the longest of them.
    """

    rows: int = 64
    tokens: int = 1 << 30

    def halved(self) -> PassLimit:
        return PassLimit(max(1, self.rows // 2), max(1, self.tokens // 2))

    @property
    def smallest(self) -> bool:
        return self.rows == 1 or self.tokens == 1

    def passes(self, terms: Sequence[Term]) -> Iterator[Sequence[Term]]:
        """Split terms, in their order, into passes; an example is never split."""
        start, longest = 0, 0
        for end, term in enumerate(terms):
            longest = max(longest, term.longest)
            rows = (end + 1 - start) * len(term.example)
            if end > start and (rows > self.rows or rows * longest > self.tokens):
                yield terms[start:end]
                start, longest = end, term.longest
        if len(terms) > start:
            yield terms[start:]


def collate(terms: Sequence[Term], *, pad_id: int) -> Batch:
    """Pad examples to one batch; causal attention needs no mask with padding on the right."""
    answers = [answer for term in terms for answer in term.example]
    longest = max(answer.length for answer in answers)
    shortest_prompt = min(len(answer.prompt_ids) for answer in answers)
    kept = longest - shortest_prompt
    ids_BT = torch.full((len(answers), longest), pad_id, dtype=torch.int64)
    written_BK, behaviour_BK, start_BK = (torch.zeros(len(answers), kept) for _ in range(3))
    starts = [logps for term in terms for logps in term.start_logps or (None,) * len(term.example)]
    for row, (answer, start_logps) in enumerate(zip(answers, starts, strict=True)):
        ids_BT[row, : answer.length] = torch.tensor(answer.prompt_ids + answer.completion_ids)
        span = _span(answer, shortest_prompt)
        written_BK[row, span] = torch.tensor(answer.written, dtype=torch.float32)
        if answer.behaviour_logps:
            behaviour_BK[row, span] = torch.tensor(answer.behaviour_logps)
        if start_logps is not None:
            start_BK[row, span] = start_logps
    return Batch(
        ids_BT=ids_BT,
        written_BK=written_BK,
        behaviour_logps_BK=behaviour_BK,
        start_logps_BK=start_BK,
        rewards_B=torch.tensor([answer.reward for answer in answers]),
        temperature_B=torch.tensor([answer.temperature for answer in answers]),
        shortest_prompt=shortest_prompt,
        answers_per_example=len(terms[0].example),
    )


def completions(values_BK: Tensor, terms: Sequence[Term], batch: Batch) -> list[tuple[Tensor, ...]]:
    """Each example's answers' values at their own completion tokens."""
    rows = iter(values_BK)
    return [
        tuple(next(rows)[_span(answer, batch.shortest_prompt)].clone() for answer in term.example) for term in terms
    ]


def _span(answer: Answer, shortest_prompt: int) -> slice:
    """Columns of a completion's tokens among the K targets."""
    start = len(answer.prompt_ids) - shortest_prompt
    return slice(start, start + len(answer.completion_ids))
