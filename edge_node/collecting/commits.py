"""Waking who waits for commits: an agent has said all it will say about some of its answers.

A commit says when to look, never what to do: whether anything is trained then is
decided by plans, policy and budget as always (`edge_node/training/schedule.py`).
"""

from __future__ import annotations

import threading
from pathlib import Path

from common.errors import TransportError


class Commits:
    """Counts commits, and remembers until a training begins that there was one; safe to use from several threads.

    Args:
        marker: an empty file that is there while there was a commit since the last `taken`; None to remember in
            memory only.
    """

    def __init__(self, marker: Path | None = None) -> None:
        self._count = 0
        self._marker = marker
        self._waiting = marker is not None and marker.exists()
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Commits since the node was opened."""
        return self._count

    @property
    def waiting(self) -> bool:
        """Whether there was a commit since the last `taken`, also before a restart."""
        return self._waiting

    def announce(self) -> None:
        """One more commit; wakes everyone who waits.

        Raises:
            TransportError: the disk did not take it; nobody was woken.
        """
        with self._changed:
            if self._marker is not None and not self._waiting:
                try:
                    self._marker.touch(mode=0o600)
                except OSError as error:
                    raise TransportError(f"the commit could not be stored: {error}") from error
            self._waiting = True
            self._count += 1
            self._changed.notify_all()

    def taken(self) -> None:
        """A training begins that has what was committed so far.

        Raises:
            TransportError: the disk did not take it; the commits wait as before.
        """
        with self._changed:
            try:
                if self._marker is not None:
                    self._marker.unlink(missing_ok=True)
            except OSError as error:
                raise TransportError(f"the commits could not be marked as taken: {error}") from error
            self._waiting = False

    def wait(self, seen: int, *, timeout_s: float) -> int:
        """Wait until there were more than `seen` commits, or for `timeout_s`; how many there were by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen, timeout=timeout_s)
            return self._count
