"""Answered requests about which selection has not decided yet: in memory, for a while, and not too many.

Nothing here is written or logged. What is forgotten, because its time is over or
because there is no room, leaves no trace; so does everything when the process ends.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from sys import getsizeof

from edge_node.marking import Mark
from edge_node.serving.exchange import Exchange, ResponseFormat

_BYTES_PER_TOKEN = 96
"""Of a token in an exchange: its id, its log-probability, whether it was free, and the lists they are in."""

_BYTES_PER_OBJECT = 512
"""Of an exchange, a message, a tool call, an answer, beside their texts."""


def recorded(exchange: Exchange) -> Exchange:
    """An exchange without what no record has: tools and schemas, and log-probabilities as the caller got them."""
    request = exchange.request
    form = None if request.response_format is None else ResponseFormat()
    answers = [
        replace(answer, logprobs=(), generation=replace(answer.generation, tops=[])) for answer in exchange.answers
    ]
    return replace(exchange, request=replace(request, tools=(), response_format=form, stop=()), answers=answers)


@dataclass(frozen=True)
class Held:
    """An exchange and what was said about it since.

    Attributes:
        rewards: of its answers, by choice, clipped.
        ratings: of its answers, by choice; the last ones.
        labels: that came with feedback.
        task_id, run_id: as feedback or a mark named them; else the request's.
    """

    exchange: Exchange
    held_since_s: float
    marking: Mark | None = None
    rewards: Mapping[int, float] = field(default_factory=dict)
    ratings: Mapping[int, float] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    task_id: str = ""
    run_id: str = ""

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        messages = [*self.exchange.request.messages, *(answer.message for answer in self.exchange.answers)]
        objects = 8 + 2 * len(messages) + sum(len(message.tool_calls) for message in messages)
        tokens = len(self.exchange.prompt_ids)
        tokens += sum(len(answer.generation.token_ids) for answer in self.exchange.answers)
        texts = sum(map(getsizeof, self._texts()))
        return objects * _BYTES_PER_OBJECT + tokens * _BYTES_PER_TOKEN + texts

    def _texts(self) -> Iterator[str]:
        request = self.exchange.request
        yield from (*request.texts, request.conversation_id, request.task_id, request.run_id)
        for answer in self.exchange.answers:
            yield from (answer.text, answer.message.content or "", answer.message.reasoning or "")
            for call in answer.message.tool_calls:
                yield from (call.id, call.name, call.arguments)
        for mark in filter(None, (self.marking, self.exchange.request.marking)):
            yield from (*mark.labels, *mark.metadata, *mark.metadata.values())
        yield from self.labels


class Pending:
    """Exchanges by id, oldest first; safe to use from several threads.

    Args:
        most: exchanges, `most_bytes` of memory, and `wait_s` seconds: what is beyond is forgotten, oldest first.
    """

    def __init__(self, *, most: int = 1000, most_bytes: int = 64 << 20, wait_s: float = 600.0) -> None:
        self._most, self._most_bytes, self._wait_s = most, most_bytes, wait_s
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, held: Held) -> None:
        """Keep an exchange, or what was said about one that is kept; not one that is too large alone."""
        name, size = held.exchange.id, held.size_bytes
        with self._lock:
            if size > self._most_bytes:
                self._drop(name)
                return
            self._bytes += size - self._sizes.get(name, 0)
            self._held[name], self._sizes[name] = held, size
            while len(self._held) > self._most or self._bytes > self._most_bytes:
                self._drop(next(iter(self._held)))

    def get(self, name: str, *, now_s: float) -> Held | None:
        """The exchange of this id, if it is still held."""
        self.forget_old(now_s=now_s)
        with self._lock:
            return self._held.get(name)

    def drop(self, name: str) -> None:
        """Forget one; it has been decided about."""
        with self._lock:
            self._drop(name)

    def forget_old(self, *, now_s: float) -> None:
        """Forget what has been held too long."""
        with self._lock:
            while self._held:
                name, oldest = next(iter(self._held.items()))
                if now_s - oldest.held_since_s <= self._wait_s:
                    return
                self._drop(name)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self._sizes.clear()
            self._bytes = 0

    def _drop(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self._bytes -= self._sizes.pop(name)
