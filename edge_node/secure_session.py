"""The site's part in secure aggregation, on disk: what is sent, opened and summed is written before it is said.

One record per round says how far its update has come (`common.secagg.states`), and
beside it lie the rounded words until the update is spent. Both are synchronised to
disk before the answer leaves, so a process that is killed anywhere has said no more
than its record says. Session keys are never written: a crash ends the session, and
the update goes into another one as far as its record allows.

At most one session is alive at a time; a new offer by the aggregator replaces it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from common.errors import PrivacyError, RoundError, TransportError, TrustError
from common.identity import SigningKey, canonical, roster_digest
from common.plan import RoundPlan
from common.secagg import SKETCH, Limits, Member, Paid, SiteSession, Terms, UpdateRecord, UpdateState, derive_terms
from common.secagg.context import compare
from common.secagg.encoding import decode, kind_of
from common.secagg.limits import check_may_upload
from common.secagg.messages import Ready, Signed
from common.secagg.states import array_sha256
from common.telemetry import log_event
from common.update import PrivateUpdate
from edge_node.policy import SitePolicy

logger = logging.getLogger("headwater.edge")

_RECORD = TypeAdapter(UpdateRecord)

_RESTORE = (
    "without it this site takes part in no secure round of this federation: restore this one file from a copy made "
    "after its round had ended, and do not remove it (docs/troubleshooting.md)"
)


class SecureSessions:
    """One site's sessions, one after the other.

    Args:
        folder: its records; made on first use, for its owner only.
        server: the aggregator's raw Ed25519 key.
        entropy: secret random bytes by their number.
    """

    def __init__(
        self, folder: Path, *, name: str, key: SigningKey, server: bytes, entropy: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._records = UpdateRecords(folder)
        self._name, self._key, self._server, self._entropy = name, key, server, entropy
        self._one_at_a_time = threading.Lock()
        self._live: SiteSession | None = None
        self._of: tuple[str, str] | None = None
        self._offer = b""

    def is_live(self, plan: RoundPlan, mode: str, request: bytes) -> bool:
        """Whether a request goes on with the session that is open, for this plan and in this mode."""
        if self._of != (plan.digest, mode) or is_ready(request):
            return False
        return _sha256(request) == self._offer or decode(Signed, request).kind != "Offer"

    def check(
        self, plan: RoundPlan, law: SitePolicy, *, mode: str, dimension: int, offered: Terms | None = None
    ) -> None:
        """Raise where this site could not take part in a round, so that nothing is spent on it.

        Args:
            dimension: of its update, which need not be there.
            offered: the aggregator's terms, where it says them.
        Raises:
            PrivacyError: the update is spent, or the policy's limits are reached.
            TrustError: the plan is for another roster, or the aggregator has other terms than this site derives.
        """
        terms = site_terms(plan, law, mode=mode, dimension=dimension)
        if offered is not None:
            compare(terms, offered)
        with self._one_at_a_time:
            _require_usable(self._records.get(terms.federation, terms.round), terms)
            check_may_upload(terms, self._name, self._records.others(terms.federation, terms.round))

    def begin(
        self, request: bytes, plan: RoundPlan, law: SitePolicy, *, mode: str, update: PrivateUpdate, ledger_head: str
    ) -> bytes:
        """Answer an offer.

        Raises:
            PrivacyError: the update is spent, or the policy's limits are reached.
            TrustError: the offer is not the aggregator's, or not what this site derives.
        """
        with self._one_at_a_time:
            terms = site_terms(plan, law, mode=mode, dimension=len(update.delta_D))
            record = self._records.get(terms.federation, terms.round)
            history = self._records.others(terms.federation, terms.round)
            session = SiteSession(
                terms,
                name=self._name,
                key=self._key,
                server=self._server,
                update=update,
                paid=Paid(update.ledger_entry, ledger_head),
                record=record,
                stored_words_D=self._records.words(record, terms.ring.dtype) if record else None,
                history=history,
                entropy=self._entropy,
            )
            reply = self._said(session, request)  # an offer that is refused leaves the open session as it was
            self._live, self._of, self._offer = session, (plan.digest, mode), _sha256(request)
            return reply

    def step(self, request: bytes) -> bytes:
        """Answer a request of the open session; raises what `SiteSession.answer` raises."""
        with self._one_at_a_time:
            if self._live is None:
                raise RoundError("no session is open", public="no session is open")
            return self._said(self._live, request)

    def _said(self, session: SiteSession, request: bytes) -> bytes:
        answer = session.answer(request)
        if answer.record is not None:
            self._records.keep(answer.record, answer.words_D)
            if answer.record.state is UpdateState.COMMITTED and self._name not in answer.record.included:
                log_event(logger, "update left out of the sum", site=self._name, round=answer.record.round)
        return answer.reply


def is_ready(request: bytes) -> bool:
    """Whether a request only asks if the update is there; raises TrustError where it is nothing at all."""
    return kind_of(request) == Ready.__name__


def offered_terms(request: bytes) -> Terms:
    """The aggregator's terms in a request of kind `Ready`; raises TrustError where there are none."""
    return decode(Ready, request).terms


def site_terms(plan: RoundPlan, law: SitePolicy, *, mode: str, dimension: int) -> Terms:
    """The terms of a round as a site derives them from its own policy; raises what `derive_terms` raises."""
    return derive_terms(
        plan,
        mode=mode,
        members=approved_members(plan, law),
        dimension=dimension,
        snapshot=plan.adapter_version,
        limits=Limits(**law.choosing.model_dump()),
        word_bits=law.upload.word_bits,
    )


def approved_members(plan: RoundPlan, law: SitePolicy) -> list[Member]:
    """The roster this site's people approved, if the plan is for it.

    Raises:
        PrivacyError: they approved none.
        TrustError: the plan is for other sites or keys.
    """
    if not law.roster:
        raise PrivacyError(
            "policy.toml approves no roster; write every site's name, key and organisation into it",
            public="this site has approved no roster",
        )
    members = [
        Member(site.name, bytes.fromhex(site.key), site.organisation, site.weight, int(site.run_by_vendor))
        for site in law.roster
    ]
    if plan.roster_digest != roster_digest({member.name: member.public for member in members}):
        reason = "the plan is for another roster than this site approved"
        raise TrustError(reason, public=reason)
    return members


def _require_usable(record: UpdateRecord | None, terms: Terms) -> None:
    """Raise PrivacyError where no session could use the update, before the aggregator counts on it."""
    spent = record is not None and record.state is UpdateState.COMMITTED
    opened = record is not None and record.state is UpdateState.OPENED and terms.mode == SKETCH
    if spent or opened:
        reason = "this round's update was used in a session that did not finish"
        raise PrivacyError(reason, public=reason)


class UpdateRecords:
    """Records and rounded words in a folder, readable by their owner only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, federation: str, number: int) -> UpdateRecord | None:
        """The round's record; None before its first session.

        Raises:
            TrustError: it cannot be read, so nobody knows what was said: no secure round is taken part in until it
                can. What was sent, left out and shown in earlier rounds bounds what may be sent in this one.
        """
        file = self._file(federation, number, "json")
        try:
            record = _RECORD.validate_json(file.read_bytes(), strict=False)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise TrustError(f"{file} cannot be read; {_RESTORE}", public="a record is damaged") from error
        if (record.federation, record.round) != (federation, number):
            raise TrustError(f"{file} is another round's record; {_RESTORE}", public="a record is damaged")
        return record

    def others(self, federation: str, number: int) -> list[UpdateRecord]:
        """All other rounds of a federation."""
        numbers = sorted(int(file.stem) for file in self._home(federation).glob("*.json"))
        found = [self.get(federation, other) for other in numbers if other != number]
        return [record for record in found if record is not None]

    def words(self, record: UpdateRecord, dtype: np.dtype) -> np.ndarray | None:
        """The rounded words that were sent; None where none were.

        Args:
            dtype: of a word; its width is not written down, and words of another are not as many as the update has.
        Raises:
            TrustError: they are not those of the record.
        """
        if not record.uploads:
            return None
        file = self._file(record.federation, record.round, "words")
        try:
            words_D = np.frombuffer(file.read_bytes(), dtype.newbyteorder("<")).astype(dtype)
        except (OSError, ValueError):
            words_D = np.zeros(0, dtype)
        if array_sha256(words_D) != record.words_sha256:
            raise TrustError(f"{file} is not what was sent before; this round is lost", public="a record is damaged")
        return words_D

    def keep(self, record: UpdateRecord, words_D: np.ndarray | None) -> None:
        """Put a record on disk, its words first; raises TransportError where the disk does not take them."""
        words = self._file(record.federation, record.round, "words")
        try:
            _make_folder(words.parent)
            if words_D is not None:
                self._forget_words_before(record)
                _replace(words, words_D.astype(words_D.dtype.newbyteorder("<")).tobytes())
            _replace(words.with_suffix(".json"), canonical(asdict(record)))
            if record.state is UpdateState.COMMITTED:
                words.unlink(missing_ok=True)  # they are never sent again
        except OSError as error:
            raise TransportError(f"the state of an update could not be stored: {error}") from error

    def _forget_words_before(self, record: UpdateRecord) -> None:
        """Words of rounds that ended without this site's choice are never sent again once a later round has begun.

        Their records stay: they are short, no more than there are rounds, and the limits count them.
        """
        for file in self._home(record.federation).glob("*.words"):
            if int(file.stem) < record.round:
                file.unlink(missing_ok=True)

    def _home(self, federation: str) -> Path:
        return self._folder / hashlib.sha256(federation.encode()).hexdigest()[:16]

    def _file(self, federation: str, number: int, kind: str) -> Path:
        return self._home(federation) / f"{number}.{kind}"


def _make_folder(folder: Path) -> None:
    """A folder for its owner only, and those above it, each on disk when this returns."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(folder.parent)


def _replace(path: Path, data: bytes) -> None:
    """Replace a file in one step that is on disk when this returns; only its owner can read it."""
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
