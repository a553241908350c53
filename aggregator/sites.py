"""How a round talks to the sites, whatever carries the messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.update import Refusal

NO_ANSWER = "no answer within"
"""How the reason of a refusal for silence begins."""

OUT_OF_REACH = "out of reach"
"""How the reason of a refusal begins where the message did not get to the site's node, or its answer not back."""


@dataclass(frozen=True)
class Reply:
    """A site's answer, not yet believed."""

    fields: Mapping[str, Any]


OnWait = Callable[[Mapping[str, "Reply | Refusal"], frozenset[str], float], None]


class Question(Protocol):
    """One kind of message to many sites, whose answers come when they come."""

    @property
    def open(self) -> frozenset[str]:
        """Sites that were asked and have not answered."""
        ...

    def ask(self, requests: Mapping[str, Mapping[str, Any]]) -> None:
        """Send one request per site that is there and has no open one; returns at once."""
        ...

    def answers(self) -> Iterable[tuple[str, Reply | Refusal]]:
        """What has arrived since the last call, one after the other, at most one answer to each request."""
        ...


class Sites(Protocol):
    """The sites that identified themselves, by name."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def look_around(self) -> None:
        """Notice who came and who went; returns at once."""
        ...

    def absence(self, site: str) -> str:
        """Why a site of the roster is not among the names."""
        ...

    def question(self, kind: str) -> Question:
        """A new question; answers to earlier ones are no answers to it."""
        ...

    def ask(
        self,
        kind: str,
        requests: Mapping[str, Mapping[str, Any]],
        *,
        timeout_s: float,
        on_wait: OnWait = lambda replies, awaited, left_s: None,
    ) -> dict[str, Reply | Refusal]:
        """Send one request per site and wait; a site that fails or is late is a Refusal.

        Args:
            on_wait: told what has come, who is awaited, and the seconds left, whenever that changes.
        """
        ...


class Pace:
    """How long to rest between two looks: short while answers come, longer and longer while none does."""

    SHORTEST_S, LONGEST_S = 0.002, 0.5

    def __init__(self) -> None:
        self._next_s = self.SHORTEST_S

    def rest(self, *, came: bool, at_most_s: float) -> None:
        self._next_s = self.SHORTEST_S if came else min(1.5 * self._next_s, self.LONGEST_S)
        time.sleep(max(0.0, min(self._next_s, at_most_s)))


def is_silence(reply: Reply | Refusal) -> bool:
    """Whether a site did not answer in time."""
    return isinstance(reply, Refusal) and reply.reason.startswith(NO_ANSWER)


def is_out_of_reach(reply: Reply | Refusal) -> bool:
    """Whether nothing was said, and it may be asked again."""
    return isinstance(reply, Refusal) and reply.reason.startswith(OUT_OF_REACH)
