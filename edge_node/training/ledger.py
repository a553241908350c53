"""The site's privacy ledger: what has been spent, and the right to refuse.

Append-only SQLite, hash-chained and signed with the site's key, each row
synchronised to disk before the caller goes on. Three kinds of row: one `budget`,
then a `reserve` before and a `commit` after each release. What is reserved is
spent, whatever happens afterwards; a release is made again from stored bytes,
never from new noise.

The budget fixes one mechanism for each purpose (training, readiness). A round may
run each of them once, and there are at most R rounds, the largest number for which
R times every mechanism costs at most `epsilon_total`. The aggregator chooses plans,
objectives and order after it has seen releases. That costs nothing more: each
mechanism is a post-processing of its dominating pair (Blackwell 1953; Zhu et al.
2022, arXiv:2106.08567), whatever was released before. So any run, also one that stops
early or leaves some out, is a post-processing of R draws from every pair made
beforehand, which is what the accountant composes. A round counts with all its
purposes from its first reservation, and as if every record had been in all of them.

A second file remembers the signed head of the chain, so that cutting rows off or
deleting the ledger is noticed. Restoring everything together is not noticed from
inside: for that the aggregator shows the head it saw last (`check_witness`).
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.accounting import PrivateSteps, epsilon
from common.errors import PrivacyError, TransportError, TrustError
from common.identity import SigningKey, canonical, replace_file, sha256_hex, verify
from common.plan import MAXIMUM_ROUNDS
from common.update import LedgerHead

ENTRY_LABEL = "ledger-entry"
NOT_THIS_SITES = "the witness shown is not a head of this site's ledger"
RESTORED = "this site's ledger is a restored backup, or a clone of it ran on"
"""Public texts of `check_witness`: after the first a site may go on, after the second it must not train."""

_GENESIS = sha256_hex(b"headwater ledger")
_OUTCOME = re.compile(r"[0-9a-f]{64}|ready|not-ready")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


@dataclass(frozen=True)
class Charge:
    """One spend.

    Attributes:
        purpose: what is released: a key of `Ledger.mechanisms`.
        round: federation and number, `name/7`; each purpose is charged once a round, whatever its plans.
        plan_digest: the plan it is for.
        event: the mechanism that runs.
        at_s: seconds since the epoch.
    """

    purpose: str
    round: str
    plan_digest: str
    event: PrivateSteps
    at_s: float


@dataclass(frozen=True)
class Reservation:
    """A charge as its owner finds it again.

    Attributes:
        entry: digest of its row; releases name it.
        outcome: what was committed: SHA-256 of the stored update, `ready` or `not-ready`; None before.
    """

    entry: str
    plan_digest: str
    outcome: str | None = None


@dataclass
class _History:
    """What the rows say; charges and reservations by purpose and round."""

    unit: str = ""
    mechanisms: dict[str, PrivateSteps] = field(default_factory=dict)
    charges: dict[tuple[str, str], Charge] = field(default_factory=dict)
    reservations: dict[tuple[str, str], Reservation] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    at_s: float = 0.0

    @property
    def rounds(self) -> set[str]:
        return {round for _, round in self.charges}

    def cost(self, rounds: int, delta: float) -> float:
        """ε of so many rounds, each with every mechanism."""
        return epsilon((replace(e, steps=e.steps * rounds) for e in self.mechanisms.values() if rounds), delta=delta)

    def add(self, digest: str, body: str) -> None:
        """Raises TrustError where a row is not one of this version's."""
        try:
            row = json.loads(body)
            kind, self.at_s = row["kind"], row["at_s"]
            if kind == "budget":
                self.unit = row["unit"]
                self.mechanisms = {purpose: PrivateSteps(**event) for purpose, event in row["mechanisms"].items()}
            elif kind == "reserve":
                place = self.places[digest] = row["purpose"], row["round"]
                self.charges[place] = Charge(*place, row["plan_digest"], self.mechanisms[place[0]], self.at_s)
                self.reservations[place] = Reservation(digest, row["plan_digest"])
            elif kind == "commit":
                place = self.places[row["entry"]]
                self.reservations[place] = replace(self.reservations[place], outcome=row["outcome"])
            else:
                raise ValueError(kind)
        except (ValueError, KeyError, TypeError, PrivacyError) as error:
            raise TrustError(
                f"the privacy ledger holds a row this version cannot read ({error!r}); training stays off"
            ) from error


class Ledger:
    """Opens, verifies and appends to one site's ledger.

    Raises:
        TrustError: a row was changed, removed or not signed by this site, or the file is damaged or cannot be opened.
        TransportError: another process holds the file locked; nothing was changed.
    """

    def __init__(self, path: Path, key: SigningKey) -> None:
        self._path = path
        self._key = key
        self._head_file = path.with_suffix(".head")
        self._lock = threading.RLock()
        self._remembered = 0
        try:
            _create(path)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except (sqlite3.Error, OSError) as error:
            raise TrustError(f"the privacy ledger cannot be opened ({error}); training stays off") from error
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS entry ("
                "sequence INTEGER PRIMARY KEY, body TEXT NOT NULL, digest TEXT NOT NULL, signature BLOB NOT NULL)"
            )
            self.verify()
        except sqlite3.Error as error:
            self._db.close()
            if getattr(error, "sqlite_errorcode", None) in _BUSY:
                raise TransportError(f"another process holds {path} locked; end it and try again") from error
            what = "cannot be opened" if isinstance(error, sqlite3.OperationalError) else "is damaged"
            raise TrustError(f"the privacy ledger {what} ({error}); training stays off") from error
        except TrustError:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def mechanisms(self) -> dict[str, PrivateSteps]:
        """The budget's mechanism by purpose; empty before `open_budget`."""
        return self._history().mechanisms

    @property
    def unit(self) -> str:
        """What the budget protects, as its first row says; empty before."""
        return self._history().unit

    def charges(self) -> list[Charge]:
        """Every charge in order, committed or not."""
        return list(self._history().charges.values())

    def entries(self) -> set[str]:
        """Digests of all reservations."""
        return set(self._history().places)

    def reservation(self, purpose: str, round: str) -> Reservation | None:
        return self._history().reservations.get((purpose, round))

    def epsilon_spent(self, delta: float) -> float:
        """ε of all rounds that were begun; a round counts with all its purposes."""
        history = self._history()
        return history.cost(len(history.rounds), delta)

    def epsilon_of_next_round(self, delta: float) -> float:
        """What one more round adds; 0 before the budget is opened."""
        history = self._history()
        rounds = len(history.rounds)
        return history.cost(rounds + 1, delta) - history.cost(rounds, delta)

    def rounds_left(self, epsilon_total: float, delta: float) -> int:
        """How many more rounds the ledger will take; 0 before the budget is opened."""
        history = self._history()
        if not history.mechanisms:
            return 0
        begun = low = len(history.rounds)
        high = begun + 1
        while high <= MAXIMUM_ROUNDS and history.cost(high, delta) <= epsilon_total:
            low, high = high, begun + 2 * (high - begun)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if history.cost(middle, delta) <= epsilon_total else (low, middle)
        return low - begun

    def open_budget(self, mechanisms: Mapping[str, PrivateSteps], *, now_s: float, unit: str) -> None:
        """Fix the privacy unit and the mechanism of each purpose for the life of the ledger.

        The same again changes nothing.

        Raises:
            PrivacyError: the ledger was opened for others.
            TrustError: the clock was set back.
            TransportError: the disk did not take it.
        """
        with self._transaction(now_s) as history:
            if not history.mechanisms:
                fixed = {purpose: asdict(event) for purpose, event in mechanisms.items()}
                self._append({"kind": "budget", "at_s": now_s, "unit": unit, "mechanisms": fixed})
            elif history.unit != unit:
                raise PrivacyError(
                    f"this budget counts one {history.unit}, policy.toml says {unit}; a new unit needs a new budget",
                    public="the site's budget was set up for another privacy unit",
                )
            elif history.mechanisms != dict(mechanisms):
                raise PrivacyError(
                    f"the first charge fixed {history.mechanisms}, the plan and training.min_samples now need "
                    f"{dict(mechanisms)}; a new schedule needs a new budget",
                    public="the round needs another mechanism than the site's budget was set up for",
                )

    def reserve(
        self, purpose: str, round: str, plan_digest: str, *, epsilon_total: float, delta: float, now_s: float
    ) -> str:
        """Charge a purpose of a round and return the entry's digest; after this the mechanism may run, once.

        Raises:
            PrivacyError: it was charged before, or another round would exceed `epsilon_total`.
            TrustError: the clock was set back.
            TransportError: the disk did not take it; the message says whether the charge stands.
        """
        with self._transaction(now_s) as history:
            if purpose not in history.mechanisms:
                raise PrivacyError(f"the budget has no mechanism for {purpose!r}; open_budget comes first")
            if (purpose, round) in history.charges:
                raise charged_before()
            _require_room(history, round, epsilon_total=epsilon_total, delta=delta)
            return self._append(
                {"kind": "reserve", "at_s": now_s, "purpose": purpose, "round": round, "plan_digest": plan_digest}
            )

    def require_room(self, round: str, *, epsilon_total: float, delta: float) -> None:
        """Raise PrivacyError where the budget does not hold this round; nothing is written."""
        _require_room(self._history(), round, epsilon_total=epsilon_total, delta=delta)

    def commit(self, entry: str, outcome: str, *, now_s: float) -> None:
        """Say what a reservation's release was; the same again changes nothing.

        Raises:
            PrivacyError: there is no such reservation, or its release was another one.
            TrustError: the clock was set back.
            TransportError: the disk did not take it.
        """
        if not _OUTCOME.fullmatch(outcome):
            raise ValueError(f"an outcome is a SHA-256, ready or not-ready, not {outcome!r}")
        with self._transaction(now_s) as history:
            place = history.places.get(entry)
            if place is None:
                raise PrivacyError(f"entry {entry[:12]} was never reserved; nothing is released under it")
            kept = history.reservations[place].outcome
            if kept is None:
                self._append({"kind": "commit", "at_s": now_s, "entry": entry, "outcome": outcome})
            elif kept != outcome:
                raise PrivacyError(
                    f"entry {entry[:12]} was committed as {kept[:12]} and cannot be {outcome[:12]} too; "
                    "only the committed release may be sent"
                )

    def signed_head(self) -> LedgerHead:
        """The last row, for others to remember."""
        with self._lock:
            return LedgerHead.signed(*self._head(), self._key)

    def check_witness(self, head: LedgerHead) -> None:
        """Compare with a head that others remember.

        Raises:
            TrustError: this site did not sign it (public text `NOT_THIS_SITES`: refuse the message, no more),
                or the chain does not hold that row (`RESTORED`).
        """
        try:
            head.verify(self._key.public)
        except TrustError as error:
            raise TrustError(f"{NOT_THIS_SITES}; it is ignored", public=NOT_THIS_SITES) from error
        if self._digest_at(head.sequence) != head.digest:
            raise TrustError(
                f"entry {head.sequence} was seen with digest {head.digest[:12]} and is not in this ledger: it is a "
                "restored backup or a clone that ran on; training stays off. Put the latest ledger back, or enrol "
                "the site with a new key and a new budget",
                public=RESTORED,
            )

    def verify(self) -> None:
        """Walk the chain; raises TrustError at the first row that does not hold."""
        previous = _GENESIS
        history = _History()
        rows = self._db.execute("SELECT sequence, body, digest, signature FROM entry ORDER BY sequence").fetchall()
        for expected, (sequence, body, digest, signature) in enumerate(rows, start=1):
            if sequence != expected or digest != _chain(previous, sequence, body):
                raise TrustError(f"the privacy ledger was altered at entry {expected}; training stays off")
            verify(self._key.public, ENTRY_LABEL, digest.encode(), signature)
            history.add(digest, body)
            previous = digest
        self._check_head()

    @contextmanager
    def _transaction(self, now_s: float) -> Iterator[_History]:
        """What is checked is what is added to; the row is on disk, and its head, when this ends."""
        with self._lock:
            try:
                with self._exclusive():
                    self.verify()  # also what changed or was cut since it was opened, before its head is written again
                    self._remember_head()  # of the last row, if that failed: the chain is never two ahead of its head
                    history = self._history()
                    if not (math.isfinite(now_s) and now_s >= history.at_s):
                        raise TrustError(
                            f"the clock was set back from {history.at_s:.0f} to {now_s:.0f} (seconds since 1970); "
                            "correct it",
                            public="this site's clock was set back",
                        )
                    yield history
                    self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise TransportError(
                    f"the privacy ledger {self._path} was not written ({error}); nothing was charged"
                ) from error
            try:
                with self._exclusive():
                    self._remember_head()
            except sqlite3.Error as error:
                raise TransportError(f"the entry stands, but the ledger's head was not written ({error})") from error

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """No other process writes meanwhile; what is not committed is undone."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _history(self) -> _History:
        history = _History()
        try:
            with self._lock:
                rows = self._db.execute("SELECT digest, body FROM entry ORDER BY sequence").fetchall()
        except sqlite3.Error as error:
            raise TransportError(f"the privacy ledger {self._path} cannot be read ({error})") from error
        for digest, body in rows:
            history.add(digest, body)
        return history

    def _append(self, row: Mapping[str, Any]) -> str:
        last, previous = self._head()
        sequence, body = last + 1, canonical(row).decode()
        digest = _chain(previous, sequence, body)
        signature = self._key.sign(ENTRY_LABEL, digest.encode())
        self._db.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (sequence, body, digest, signature))
        return digest

    def _head(self) -> tuple[int, str]:
        """Sequence and digest of the last row."""
        last = self._db.execute("SELECT sequence, digest FROM entry ORDER BY sequence DESC LIMIT 1").fetchone()
        return (last[0], last[1]) if last else (0, _GENESIS)

    def _digest_at(self, sequence: int) -> str | None:
        if sequence == 0:
            return _GENESIS
        with self._lock:
            row = self._db.execute("SELECT digest FROM entry WHERE sequence = ?", (sequence,)).fetchone()
        return row[0] if row else None

    def _remember_head(self) -> None:
        sequence, digest = self._head()
        if sequence in (0, self._remembered):
            return
        try:
            replace_file(self._head_file, f"{LedgerHead.signed(sequence, digest, self._key).encode()}\n".encode())
        except OSError as error:  # the charge stands; opening allows a head that is behind
            raise TransportError(f"entry {sequence} stands, but the ledger's head was not written ({error})") from error
        self._remembered = sequence

    def _check_head(self) -> None:
        """The chain still holds the row that was its head; raises TrustError where it was cut."""
        if not self._head_file.exists():
            if self._head()[0] > 1:
                raise TrustError("the privacy ledger's head file is missing; training stays off")
            return
        try:
            head = LedgerHead.parse(self._head_file.read_text().removesuffix("\n"))
        except (TrustError, ValueError, OSError) as error:
            raise TrustError("the privacy ledger's head file is damaged; training stays off") from error
        head.verify(self._key.public)
        if self._digest_at(head.sequence) != head.digest:
            raise TrustError(f"the privacy ledger was cut before entry {head.sequence}; training stays off")


def _require_room(history: _History, round: str, *, epsilon_total: float, delta: float) -> None:
    """Raise PrivacyError where the rounds that were begun, and this one, cost more than the budget."""
    begun = history.rounds
    rounds = len(begun | {round})
    after = history.cost(rounds, delta)
    if after <= epsilon_total:
        return
    spent = history.cost(len(begun), delta)
    raise PrivacyError(
        f"this round needs epsilon {after - spent:.3f} but {max(0.0, epsilon_total - spent):.3f} "
        f"of {epsilon_total} is left; raise epsilon_total in policy.toml or stop training",
        public="the site's privacy budget does not hold another round",
    )


def charged_before() -> PrivacyError:
    """What answers a second try at a round."""
    return PrivacyError(
        "this round was charged before; its stored update may be sent again, new noise may not",
        public="this round was charged before and its update is gone",
    )


def _create(path: Path) -> None:
    """An empty file for its owner only; one that is there is taken from the others."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(mode & 0o700)


def _chain(previous: str, sequence: int, body: str) -> str:
    return sha256_hex(f"{previous}\n{sequence}\n{body}".encode())
