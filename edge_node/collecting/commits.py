"""Waking who waits for commits: an agent has said all it will say about some of its answers.

A commit says when to look, never what to do: whether anything is trained then is
decided by plans, policy and budget as always.
"""

from __future__ import annotations

import threading


class Commits:
    """Counts commits; safe to use from several threads."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Commits since the node was opened."""
        return self._count

    def announce(self) -> None:
        """One more commit; wakes everyone who waits."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, seen: int, *, timeout_s: float) -> int:
        """Wait until there were more than `seen` commits, or for `timeout_s`; how many there were by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen, timeout=timeout_s)
            return self._count
