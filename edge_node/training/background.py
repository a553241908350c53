"""Training beside the messages: one thread, one update at a time, an answer at once.

A message that waited for training would stay open for hours and be lost with the
connection. So the first one starts it, and the later ones ask whether it is done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from common.telemetry import log_event
from common.update import PrivateUpdate

logger = logging.getLogger("headwater.edge")

_STOP_WAIT_S = 60.0


class BackgroundTraining:
    """Runs one training at a time; `result` never waits.

    A process that is killed meanwhile loses no privacy: the reservation is written before the first step, and
    training goes on under it (`SiteTraining`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._plan_digest = ""
        self._update: PrivateUpdate | None = None
        self._error: Exception | None = None
        self._closed = False

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def result(self, plan_digest: str, train: Callable[[], PrivateUpdate]) -> PrivateUpdate | None:
        """The update of `train` for a plan; None while this or another plan's is being made.

        What training raised is raised here once; the next call starts it again.
        """
        with self._lock:
            if self.is_busy:
                return None
            if self._thread is not None and self._plan_digest == plan_digest:
                update, error = self._update, self._error
                self._thread = self._update = self._error = None
                if error is not None:
                    raise error
                return update
            self._start(plan_digest, train)
            return None

    def begin(self, plan_digest: str, train: Callable[[], PrivateUpdate]) -> None:
        """Start the training for a plan before anybody asks; nothing where one is under way, or this one has ended."""
        with self._lock:
            if not self.is_busy and (self._thread is None or self._plan_digest != plan_digest):
                self._start(plan_digest, train)

    def close(self) -> None:
        """Start nothing any more, and wait for what is being trained, for a while."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_S)

    def _start(self, plan_digest: str, train: Callable[[], PrivateUpdate]) -> None:
        if self._closed:
            return
        if self._error is not None:  # of a plan that nobody asks for any more
            log_event(logger, "training for an earlier plan failed", error=type(self._error).__name__)
        self._plan_digest, self._update, self._error = plan_digest, None, None
        self._thread = threading.Thread(target=self._run, args=(train,), name="train", daemon=True)
        self._thread.start()

    def _run(self, train: Callable[[], PrivateUpdate]) -> None:
        try:
            self._update = train()
        except Exception as error:  # outermost in this thread: raised where the update is asked for
            self._error = error
