"""Answered requests about which selection has not decided yet: in memory, for a while, and not too many.

Nothing here is written or logged. What is forgotten, because its time is over or
because there is no room, leaves no trace; so does everything when the process ends.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_node.marking import Mark
    from edge_node.serving.exchange import Exchange

_BYTES_PER_TOKEN = 64
"""Of a token in an exchange: its id, its log-probability and the lists they are in."""


@dataclass(frozen=True)
class Held:
    """An exchange and what was said about it since.

    Attributes:
        rewards: of its answers, by choice, clipped.
        labels: that came with feedback.
        task_id, run_id: as feedback or a mark named them; else the request's.
    """

    exchange: Exchange
    held_since_s: float
    marking: Mark | None = None
    rewards: Mapping[int, float] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    task_id: str = ""
    run_id: str = ""

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        exchange = self.exchange
        texts = [message.content or "" for message in exchange.request.messages]
        texts += [answer.text for answer in exchange.answers]
        tokens = len(exchange.prompt_ids) + sum(len(answer.generation.token_ids) for answer in exchange.answers)
        return 4096 + sum(map(len, texts)) * 2 + tokens * _BYTES_PER_TOKEN


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
