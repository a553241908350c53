"""When the training of a round begins: at once, or when the site's agents have said that they are done.

An accepted plan is held, also on disk, until its training is due: an agent has called
/commit since the last training began; or the plan has waited long enough; or what is
left until its deadline is only just enough. Whether there are records, or what a
commit marked, decides nothing: one record more would then move the window of a round
and with it every other record of it, which no accountant covers
(docs/decisions/0013-commits-decide-when-and-records-do-not.md).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import HeadwaterError, TransportError
from common.identity import replace_file
from common.plan import RoundPlan
from common.telemetry import log_event

logger = logging.getLogger("headwater.edge")

_MARGIN = 2.0
"""Of the expected time of training: a machine that also serves is slower than when it was measured."""
_SETTLE_S = 60.0
"""Before a deadline, for loading the model, the self-test and the aggregator's next question."""
_SHORTEST_WAIT_S, _LOOK_AGAIN_S = 0.2, 5.0


class Held(BaseModel):
    """A plan as its message brought it, and how far it has come.

    Attributes:
        witness: the ledger head that came with it.
        mode: of aggregation.
        begun: its training has begun; after a restart it goes on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    plan_digest: str
    payload: bytes
    signature: bytes
    witness: str
    mode: str
    deadline_s: float
    arrived_s: float
    begun: bool = False


@dataclass(frozen=True)
class Asked:
    """A message's plan, which the node has accepted."""

    plan: RoundPlan
    payload: bytes
    signature: bytes
    witness: str
    mode: str


class WaitsForCommits(Protocol):
    """What the schedule needs of `edge_node.collecting.commits.Commits`."""

    @property
    def count(self) -> int: ...
    @property
    def waiting(self) -> bool: ...
    def taken(self) -> None: ...
    def wait(self, seen: int, *, timeout_s: float) -> int: ...


def due_at_s(held: Held, *, committed: bool, wait_s: float, training_s: float) -> float:
    """When the training of a plan is to begin, as far as is known; what has passed means now.

    Args:
        committed: whether an agent has committed since the last training began.
        wait_s: how long a plan may wait for that.
        training_s: how long its steps will take, measured on public text.
    """
    if held.begun or committed:
        return -math.inf  # whatever has become of the clock
    return min(held.arrived_s + wait_s, held.deadline_s - _SETTLE_S - _MARGIN * training_s)


class Schedule:
    """Holds the latest accepted plan until it is due; safe to use from several threads.

    Args:
        file: where the plan is held.
        wait_s: as for `due_at_s`.
        expected_s: of a held plan, how long its training will take; may load the model.
        begin: starts the training of a held plan beside everything else, where it may still be trained.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        file: Path,
        commits: WaitsForCommits,
        *,
        wait_s: float,
        expected_s: Callable[[Held], float],
        begin: Callable[[Held], None],
        clock: Callable[[], float],
    ) -> None:
        self._file = file
        self._commits = commits
        self._wait_s = wait_s
        self._expected_s = expected_s
        self._begin = begin
        self._clock = clock
        self._lock = threading.RLock()
        self._held = _read(file)
        self._training_s: tuple[str, float] = ("", 0.0)
        self._watching: threading.Thread | None = None
        self._closed = False

    def resume(self) -> None:
        """Go on with what was held when the process ended."""
        with self._lock:
            if self._held is not None:
                self._watch()

    def may_begin(self, asked: Asked) -> bool:
        """Whether the training of a plan may begin; if so it has begun, if not the plan is held. Never waits.

        A plan that is held takes the place of the one before it.

        Raises:
            TransportError: the disk did not take it; nothing has begun.
        """
        with self._lock:
            if self._closed:
                return False
            held = self._held
            if held is None or held.plan_digest != asked.plan.digest:
                held = _arrived(asked, now_s=self._clock())
            if self._is_due(held):
                self._mark_begun(held)
                return True
            if held is not self._held:
                self._keep(held)
            self._watch()
            return False

    def close(self) -> None:
        """Begin nothing any more; what is held stays held on disk."""
        with self._lock:
            self._closed = True

    def _is_due(self, held: Held) -> bool:
        return self._clock() >= self._due_at_s(held)

    def _due_at_s(self, held: Held) -> float:
        digest, seconds = self._training_s
        training_s = seconds if digest == held.plan_digest else 0.0  # not measured yet
        return due_at_s(held, committed=self._commits.waiting, wait_s=self._wait_s, training_s=training_s)

    def _mark_begun(self, held: Held) -> None:
        if not held.begun:
            self._keep(held.model_copy(update={"begun": True}))
            self._commits.taken()

    def _keep(self, held: Held) -> None:
        try:
            replace_file(self._file, held.model_dump_json().encode())
        except OSError as error:
            raise TransportError(f"the plan could not be held: {error}") from error
        self._held = held

    def _watch(self) -> None:
        if not self._closed and (self._watching is None or not self._watching.is_alive()):
            self._watching = threading.Thread(target=self._run, name="schedule", daemon=True)
            self._watching.start()

    def _run(self) -> None:
        """Wait for commits until what is held is due, and begin it."""
        try:
            while True:
                seen, held = self._commits.count, self._held
                assert held is not None  # there was one when this thread began
                self._measure(held)
                due = self._take_due(held)
                if due == "now":
                    self._begin(held)
                if due != "not yet" and self._ends(held):
                    return
                left_s = self._due_at_s(held) - self._clock()
                self._commits.wait(seen, timeout_s=min(max(left_s, _SHORTEST_WAIT_S), _LOOK_AGAIN_S))
        except Exception as error:  # outermost in this thread: whoever asks next begins it, or is told why not
            reason = str(error) if isinstance(error, HeadwaterError) else ""
            log_event(logger, "held plan was not begun", error=type(error).__name__, reason=reason)

    def _ends(self, held: Held) -> bool:
        """Whether the watching thread has nothing left to wait for; a plan may have come while it began this one."""
        with self._lock:
            over = self._closed or self._held is None or self._held.plan_digest == held.plan_digest
            if over:
                self._watching = None
            return over

    def _take_due(self, held: Held) -> Literal["now", "not yet", "over"]:
        with self._lock:
            if self._closed:
                return "over"
            if self._held is None or self._held.plan_digest != held.plan_digest:
                return "not yet"  # another plan has taken its place
            if self._held.begun and not held.begun:
                return "over"  # a message has begun it
            if not self._is_due(held):
                return "not yet"
            self._mark_begun(held)
            return "now"

    def _measure(self, held: Held) -> None:
        """Learn how long training will take; where that fails it is due, and training says what is wrong."""
        if held.begun or self._training_s[0] == held.plan_digest or self._is_due(held):
            return
        try:
            seconds = self._expected_s(held)
        except HeadwaterError:
            seconds = float("inf")
        self._training_s = (held.plan_digest, seconds)


def _arrived(asked: Asked, *, now_s: float) -> Held:
    return Held(
        plan_digest=asked.plan.digest,
        payload=asked.payload,
        signature=asked.signature,
        witness=asked.witness,
        mode=asked.mode,
        deadline_s=asked.plan.deadline_s,
        arrived_s=now_s,
    )


def _read(file: Path) -> Held | None:
    """What is held; a file that cannot be read holds nothing, because the plan will be asked for again."""
    try:
        return Held.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        log_event(logger, "held plan cannot be read", error=type(error).__name__)
        return None
