"""What private training works on: answers as they were served, grouped into examples and units.

An `Answer` is one completion with its token ids as served. An `Example` is what one
term of an objective needs: one answer, a (chosen, rejected) pair, or a group of
regenerations. A `Unit` is what privacy is guaranteed for: its examples share one
gradient, which is clipped as a whole. With trajectories as units every unit has one
example; with users as units it has up to K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExampleKind = Literal["pairs", "answers", "thumbs", "groups"]
"""`pairs`: (chosen, rejected). `answers`: one rewarded answer. `thumbs`: one answer whose reward is +1 or -1.
`groups`: the first G answers to one request."""


@dataclass(frozen=True)
class Answer:
    """One completion as served.

    Attributes:
        written: per completion token, whether the model wrote it (tool results and user turns are not trained on).
        behaviour_logps: per completion token, under the distribution it was drawn from; empty where not recorded.
        reward: what the objective optimises; its meaning is fixed by the kind of example.
        temperature: of that distribution.
        adapter_digest: of the version that served it.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    written: tuple[bool, ...]
    behaviour_logps: tuple[float, ...] = ()
    reward: float = 0.0
    temperature: float = 1.0
    adapter_digest: str = ""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


Example = tuple[Answer, ...]


@dataclass(frozen=True)
class Unit:
    """Everything one privacy unit contributes to a round."""

    examples: tuple[Example, ...]
