"""Examples to padded rows of token ids, and how many of them fit a forward pass.

Answers of one example that begin with the same prompt stand in one row, the prompt
once: each answer attends to the prompt and to itself, at the positions it had when
it was served. That is exact, and saves the most where prompts are long and answers
many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from edge_node.training.units import Answer, Example

_ATTENTION_LENGTH = 2048
"""Tokens of a row at which attention costs about as much as the rest; only time depends on it."""


@dataclass(frozen=True)
class Row:
    """Answers whose first `shared` prompt tokens are the same and are computed once."""

    shared: int
    answers: tuple[Answer, ...]

    @property
    def length(self) -> int:
        return self.shared + sum(answer.length - self.shared for answer in self.answers)


def rows_of(example: Example) -> tuple[Row, ...]:
    """One row for all answers where that costs less than one row each; a rule on this example alone."""
    apart = tuple(Row(0, (answer,)) for answer in example)
    first, *others = (answer.prompt_ids for answer in example)
    together = Row(
        sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(first, *others, strict=False))), example
    )
    masked = 2 * together.length / _ATTENTION_LENGTH  # a mask of our own forgoes the causal shortcut
    if len(example) > 1 and together.length * (1 + masked) < sum(
        row.length * (1 + row.length / _ATTENTION_LENGTH) for row in apart
    ):
        return (together,)
    return apart


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

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return rows_of(self.example)

    @property
    def longest(self) -> int:
        return max(row.length for row in self.rows)


@dataclass(frozen=True)
class Batch:
    """Right-padded rows, example by example: N completion tokens of B answers, at most K each, in rows of T.

    Attributes:
        ids_RT: token ids.
        positions_RT, sees_R1TT: where each token stands in its own answer, and what it attends to; None where every
            row is one answer, whose attention is causal.
        source_N: index into the flattened rows of the token before each completion token.
        target_N: the completion tokens; `place_N`: their index into the flattened [B, K].
        written_BK, behaviour_logps_BK, start_logps_BK: per completion token, counted from its answer's first.
        temperature_B: of the distribution each answer was drawn from.
    """

    ids_RT: Tensor
    positions_RT: Tensor | None
    sees_R1TT: Tensor | None
    source_N: Tensor
    target_N: Tensor
    place_N: Tensor
    written_BK: Tensor
    behaviour_logps_BK: Tensor
    start_logps_BK: Tensor
    rewards_B: Tensor
    temperature_B: Tensor
    answers_per_example: int

    @property
    def examples(self) -> int:
        return len(self.rewards_B) // self.answers_per_example


@dataclass(frozen=True)
class PassLimit:
    """What one forward pass may hold; memory only, never the mechanism.

    Attributes:
        rows: of the pass; `tokens`: rows times the longest of them.
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
        start, rows, longest = 0, 0, 0
        for end, term in enumerate(terms):
            rows, longest = rows + len(term.rows), max(longest, term.longest)
            if end > start and (rows > self.rows or rows * longest > self.tokens):
                yield terms[start:end]
                start, rows, longest = end, len(term.rows), term.longest
        if len(terms) > start:
            yield terms[start:]


def collate(terms: Sequence[Term], *, pad_id: int) -> Batch:
    """Pad examples to one batch; with padding on the right, causal attention needs no mask."""
    rows = [row for term in terms for row in term.rows]
    answers = [answer for term in terms for answer in term.example]
    longest = max(row.length for row in rows)
    kept = max(len(answer.completion_ids) for answer in answers)
    sharing = any(len(row.answers) > 1 for row in rows)
    ids_RT = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    positions_RT, answer_RT = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    sources: list[Tensor] = []
    for index, row in enumerate(rows):
        end = row.shared
        ids_RT[index, :end] = torch.tensor(row.answers[0].prompt_ids[:end])
        positions_RT[index, :end] = torch.arange(end)
        for number, answer in enumerate(row.answers, start=1):
            own = answer.prompt_ids[row.shared :]
            start, end = end, end + answer.length - row.shared
            ids_RT[index, start:end] = torch.tensor(own + answer.completion_ids)
            positions_RT[index, start:end] = torch.arange(row.shared, answer.length)
            answer_RT[index, start:end] = number
            source_K = torch.arange(start + len(own) - 1, end - 1)
            if not own:  # the prompt is shared to its end, so that is what comes before
                source_K[0] = row.shared - 1
            sources.append(index * longest + source_K)
    written_BK, behaviour_BK, start_BK = (torch.zeros(len(answers), kept) for _ in range(3))
    starts = [logps for term in terms for logps in term.start_logps or (None,) * len(term.example)]
    for index, (answer, start_logps) in enumerate(zip(answers, starts, strict=True)):
        count = len(answer.completion_ids)
        written_BK[index, :count] = torch.tensor(answer.written, dtype=torch.float32)
        if answer.behaviour_logps:
            behaviour_BK[index, :count] = torch.tensor(answer.behaviour_logps)
        if start_logps is not None:
            start_BK[index, :count] = start_logps
    return Batch(
        ids_RT=ids_RT,
        positions_RT=positions_RT if sharing else None,
        sees_R1TT=_sees(answer_RT) if sharing else None,
        source_N=torch.cat(sources),
        target_N=torch.tensor([token for answer in answers for token in answer.completion_ids]),
        place_N=torch.tensor([b * kept + k for b, a in enumerate(answers) for k in range(len(a.completion_ids))]),
        written_BK=written_BK,
        behaviour_logps_BK=behaviour_BK,
        start_logps_BK=start_BK,
        rewards_B=torch.tensor([answer.reward for answer in answers]),
        temperature_B=torch.tensor([answer.temperature for answer in answers]),
        answers_per_example=len(terms[0].example),
    )


def _sees(answer_RT: Tensor) -> Tensor:
    """A token sees the shared prompt (0) and its own answer, up to itself; bool [R, 1, T, T]."""
    longest = answer_RT.shape[1]
    related = (answer_RT[:, None, :] == 0) | (answer_RT[:, None, :] == answer_RT[:, :, None])
    return (related & torch.ones(longest, longest, dtype=torch.bool).tril())[:, None]


def completions(values_BK: Tensor, terms: Sequence[Term]) -> list[tuple[Tensor, ...]]:
    """Each example's answers' values at their own completion tokens."""
    rows = iter(values_BK)
    return [tuple(next(rows)[: len(answer.completion_ids)].clone() for answer in term.example) for term in terms]
