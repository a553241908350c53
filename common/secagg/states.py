"""What becomes of one update, on disk: how often it may be sent, opened and summed.

    NEW → UPLOADED → OPENED → COMMITTED

A site writes the new state before it sends what the state is about. A sketch is
opened at most once per update, ever; after that the update may only be sent to be
summed. An update that was committed to a sum is never sent again. So no sequence
of sessions, and no crash, gives a second look at it.

The same records are the memory by which a site holds the server to its limits
(`common.secagg.limits`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from common.errors import PrivacyError
from common.secagg.context import SKETCH, Terms

UPLOADS = 4
"""Times an update is sent: once, and three repetitions."""

SESSIONS = 16
"""Sessions of one round that a site lets be opened."""


class UpdateState(StrEnum):
    NEW = "new"
    UPLOADED = "uploaded"
    OPENED = "opened"
    COMMITTED = "committed"


NEXT = {
    UpdateState.NEW: frozenset({UpdateState.UPLOADED}),
    UpdateState.UPLOADED: frozenset({UpdateState.UPLOADED, UpdateState.OPENED, UpdateState.COMMITTED}),
    UpdateState.OPENED: frozenset({UpdateState.OPENED, UpdateState.COMMITTED}),
    UpdateState.COMMITTED: frozenset[UpdateState](),
}


@dataclass(frozen=True)
class UpdateRecord:
    """One update of one (federation, round); exactly one is ever made.

    Attributes:
        planned_rounds: of the plan.
        update_sha256: of its floats.
        sessions: hex of every session opened for it.
        uploads: times it was sent.
        words_sha256: of the rounded words, which are kept and sent again as they are.
        scale: of those words, in steps per unit.
        sketched_share: of its dimensions that were projected.
        included: who was in the sum it was committed to.
    """

    federation: str
    round: int
    planned_rounds: int
    plan_digest: str
    update_sha256: str
    state: UpdateState = UpdateState.NEW
    sessions: tuple[str, ...] = ()
    uploads: int = 0
    words_sha256: str = ""
    scale: float = 0.0
    sketched_share: float = 0.0
    included: tuple[str, ...] = ()


def new_record(terms: Terms, update_D: np.ndarray) -> UpdateRecord:
    return UpdateRecord(terms.federation, terms.round, terms.planned_rounds, terms.plan_digest, array_sha256(update_D))


def array_sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def begin(record: UpdateRecord, terms: Terms, session: bytes, update_D: np.ndarray) -> UpdateRecord:
    """A session is opened for the update.

    Raises:
        PrivacyError: the session was opened before, or this update has no session left to it.
    """
    owner = (terms.federation, terms.round, terms.plan_digest, array_sha256(update_D))
    if (record.federation, record.round, record.plan_digest, record.update_sha256) != owner:
        raise _refuse(record, "this round has another update already")
    if session.hex() in record.sessions:
        raise _refuse(record, "the session was opened before")
    if len(record.sessions) >= SESSIONS:
        raise _refuse(record, f"{SESSIONS} sessions were opened for it")
    _check_sendable(record, terms)
    return dataclasses.replace(record, sessions=(*record.sessions, session.hex()))


def upload(record: UpdateRecord, terms: Terms, words_D: np.ndarray) -> UpdateRecord:
    """The masked words are about to be sent."""
    _check_sendable(record, terms)
    words = array_sha256(words_D)
    if record.uploads and words != record.words_sha256:
        raise _refuse(record, "its stored words are not those that were sent before")
    if record.uploads and record.scale != terms.ring.scale:
        raise _refuse(record, "it was sent in words of another scale")
    state = UpdateState.OPENED if record.state is UpdateState.OPENED else UpdateState.UPLOADED
    sent = dataclasses.replace(_advance(record, state), uploads=record.uploads + 1)
    return dataclasses.replace(sent, words_sha256=words, scale=terms.ring.scale)


def open_sketch(record: UpdateRecord, terms: Terms) -> UpdateRecord:
    """A projection is about to be opened: once, ever."""
    if record.state is not UpdateState.UPLOADED:
        raise _refuse(record, "its sketch was opened before")
    return dataclasses.replace(_advance(record, UpdateState.OPENED), sketched_share=terms.sketched_share)


def commit_to(record: UpdateRecord, included: tuple[str, ...]) -> UpdateRecord:
    """The choice is about to be signed: the update is spent."""
    return dataclasses.replace(_advance(record, UpdateState.COMMITTED), included=included)


def _check_sendable(record: UpdateRecord, terms: Terms) -> None:
    if record.state is UpdateState.COMMITTED:
        raise _refuse(record, "it was committed to a sum and is never sent again")
    if record.state is UpdateState.OPENED and terms.mode == SKETCH:
        raise _refuse(record, "its sketch was opened; it may only be summed")
    if record.uploads >= UPLOADS:
        raise _refuse(record, f"it was sent {UPLOADS} times")


def _advance(record: UpdateRecord, state: UpdateState) -> UpdateRecord:
    if state not in NEXT[record.state]:
        raise _refuse(record, f"{record.state} cannot become {state}")
    return dataclasses.replace(record, state=state)


def _refuse(record: UpdateRecord, reason: str) -> PrivacyError:
    return PrivacyError(f"the update of round {record.round} is not used: {reason}", public=reason)
