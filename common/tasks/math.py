"""Two-digit arithmetic with written steps: an endless, verified task.

A problem is a pure function of its operands, so every answer can be checked
exactly and nothing has to be stored. Problems fall into three disjoint splits
by a hash of their operands (`split_of`): what is measured on `HELD_OUT` or
replayed on `GOLDEN` never appears in `TRAIN`, whatever the phrasing or the
order of a sum's operands.

The scorer reads chat messages only; it never sees how they were recorded.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.chat import Message

NAME = "math"
OPERATORS = ("+", "-")
PHRASINGS = ("What is {}?", "Compute {}.", "{}=?")

_EXPRESSION = re.compile(r"(?<!\d)(\d{2})\s*([+-])\s*(\d{2})(?!\d)")
_FINAL_ANSWER = re.compile(r"Answer: (-?\d{1,6})$")


class Split(StrEnum):
    """Disjoint parts of the problem space."""

    TRAIN = "train"
    GOLDEN = "golden"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Problem:
    """`left operator right`, both operands in 10..99, result never negative."""

    left: int
    operator: str
    right: int
    phrasing: int = 0

    @property
    def expression(self) -> str:
        return f"{self.left}{self.operator}{self.right}"

    @property
    def prompt(self) -> str:
        return PHRASINGS[self.phrasing].format(self.expression)

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def steps(self) -> tuple[str, str]:
        """The two written steps a full answer shows."""
        units, tens = self.right % 10, self.right // 10 * 10
        if self.operator == "+":
            return (
                f"{self.left % 10}+{units}={self.left % 10 + units}",
                f"{self.left // 10 * 10}+{tens}={self.left // 10 * 10 + tens}",
            )
        without_tens = self.left - tens
        return f"{self.left}-{tens}={without_tens}", f"{without_tens}-{units}={self.answer}"

    @property
    def carries(self) -> bool:
        """Whether the units carry over or have to borrow."""
        if self.operator == "+":
            return self.left % 10 + self.right % 10 >= 10
        return self.left % 10 < self.right % 10

    @property
    def solution(self) -> str:
        """The answer that scores 1."""
        return f"{' ; '.join(self.steps)}\nAnswer: {self.answer}"


@dataclass(frozen=True)
class Distribution:
    """Which problems one site's users ask: operators, operand range, phrasings."""

    operators: tuple[str, ...] = OPERATORS
    low: int = 10
    high: int = 99
    phrasings: tuple[int, ...] = tuple(range(len(PHRASINGS)))


SITE_DISTRIBUTIONS = (
    Distribution(operators=("+",), phrasings=(0, 1)),
    Distribution(operators=("-",), phrasings=(0, 2)),
    Distribution(low=10, high=69, phrasings=(1,)),
    Distribution(low=30, high=99, phrasings=(0,)),
    Distribution(),
    Distribution(phrasings=(2,)),
)
"""Non-IID by construction; site i of a simulation draws from entry i modulo the length."""


@dataclass(frozen=True)
class Score:
    """Parts of the reward, each in [0, 1]; `total` is 0.3·steps + 0.5·answer + 0.2·format."""

    steps: float
    answer: float
    format: float

    @property
    def total(self) -> float:
        return 0.3 * self.steps + 0.5 * self.answer + 0.2 * self.format


def split_of(problem: Problem) -> Split:
    """Split by a hash of the operands: 10 % held out, 10 % golden, the rest training."""
    operands = (problem.left, problem.right)
    if problem.operator == "+":
        operands = (min(operands), max(operands))
    digest = hashlib.sha256(f"{operands[0]}{problem.operator}{operands[1]}".encode()).digest()
    bucket = digest[0] % 10
    return Split.HELD_OUT if bucket == 0 else Split.GOLDEN if bucket == 1 else Split.TRAIN


def problems(distribution: Distribution, split: Split, seed: int) -> Iterator[Problem]:
    """Draw problems of one split without end; the same seed gives the same stream."""
    rng = random.Random(f"{seed}:{split}")
    while True:
        left = rng.randint(distribution.low, distribution.high)
        right = rng.randint(distribution.low, distribution.high)
        operator = rng.choice(distribution.operators)
        if operator == "-" and left < right:
            left, right = right, left
        problem = Problem(left, operator, right, rng.choice(distribution.phrasings))
        if split_of(problem) is split:
            yield problem


def parse(prompt: str) -> Problem | None:
    """The problem a user message asks, or None where it asks none."""
    found = _EXPRESSION.search(prompt)
    if found is None:
        return None
    left, operator, right = int(found[1]), found[2], int(found[3])
    if min(left, right) < 10 or (operator == "-" and left < right):
        return None
    return Problem(left, operator, right)


def score_answer(problem: Problem, text: str) -> Score:
    """Check a written answer against its problem."""
    lines = text.strip().split("\n")
    final = _FINAL_ANSWER.search(lines[-1])
    written = [step.strip() for step in lines[0].split(";")] if len(lines) == 2 else []
    return Score(
        steps=sum(step in written for step in problem.steps) / len(problem.steps) if final else 0.0,
        answer=float(final is not None and int(final[1]) == problem.answer),
        format=float(final is not None and len(written) == len(problem.steps)),
    )


def score(messages: Sequence[Message]) -> Score | None:
    """Score the last assistant message against the last user message before it.

    Returns None where the conversation is not about this task.
    """
    answer = next((m for m in reversed(messages) if m.role == "assistant"), None)
    question = next((m for m in reversed(messages) if m.role == "user"), None)
    problem = parse(question.content or "") if question is not None else None
    if answer is None or problem is None:
        return None
    return score_answer(problem, answer.content or "")
