"""The aggregator's memory of its rounds, from which a killed process goes on.

SQLite, every step synchronised to disk before the next one begins, readable by
its owner only, one process at a time. A round is `open` from before any site can
know its plan; `combined` when the aggregate is stored; `published` when a version
was made of it; `closed` when that version's canary is decided; or `voided`.

What sites handed over is kept as they sealed it, and erased once it is combined.
The round's sealing key lies encrypted under a key in a file of its own, and is
erased when no update can be for it any more.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from aggregator.cohort import EXCLUDING_STAGES, SUSPENDED, suspensions
from aggregator.rules import tolerated_liars
from common.errors import ConfigError, TransportError, TrustError
from common.identity import SealingKey, load_or_create_secret
from common.plan import RoundPlan, parse_plan
from common.process_lock import ProcessLock
from common.update import Aggregate, Refusal, SealedUpdate
from model_hub.rollout import Stage

_NONCE_BYTES = 12
_SCHEMA = """
CREATE TABLE IF NOT EXISTS round (
    number INTEGER PRIMARY KEY, step TEXT NOT NULL, plan BLOB NOT NULL, sealing_key BLOB, opened_at_s REAL NOT NULL,
    delta BLOB, rule TEXT, participants TEXT, refusals TEXT, version TEXT, stage TEXT, void_reason TEXT
);
CREATE TABLE IF NOT EXISTS answer (
    round INTEGER NOT NULL, site TEXT NOT NULL, refusal TEXT,
    plan_digest TEXT, ledger_entry TEXT, ledger_head TEXT, ciphertext BLOB, signature BLOB,
    PRIMARY KEY (round, site)
);
CREATE TABLE IF NOT EXISTS choice (round INTEGER PRIMARY KEY, included TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS readmission (
    sequence INTEGER PRIMARY KEY, site TEXT NOT NULL, after_round INTEGER NOT NULL, at_s REAL NOT NULL
);
"""


class Step(StrEnum):
    """How far a round is."""

    OPEN = "open"
    COMBINED = "combined"
    PUBLISHED = "published"
    CLOSED = "closed"
    VOIDED = "voided"


NEXT: dict[Step, frozenset[Step]] = {
    Step.OPEN: frozenset({Step.COMBINED, Step.VOIDED}),
    Step.COMBINED: frozenset({Step.PUBLISHED, Step.VOIDED}),
    Step.PUBLISHED: frozenset({Step.CLOSED}),
    Step.CLOSED: frozenset(),
    Step.VOIDED: frozenset(),
}


@dataclass(frozen=True)
class RoundRecord:
    """What became of one round; `version` and `stage` are None where it was voided."""

    number: int
    participants: tuple[str, ...]
    refused: tuple[Refusal, ...]
    version: str | None
    stage: Stage | None
    void_reason: str | None = None


class RoundLog:
    """The log in a folder: `rounds.sqlite`, `rounds.key` and the owner's `rounds.lock`.

    Args:
        owned: whether this process runs the rounds; another may look, and readmit sites.
    Raises:
        ConfigError: another process owns it, it is damaged, or it cannot be opened.
        TrustError: others can read it.
    """

    def __init__(self, folder: Path, *, owned: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / "rounds.sqlite"
        self._owned = owned
        self._lock = _locked(folder) if owned else None
        try:
            self._secret = AESGCM(load_or_create_secret(folder / "rounds.key")) if owned else None
            self._db = _opened(self._path)
        except BaseException:
            self._unlock()
            raise

    @property
    def folder(self) -> Path:
        return self._path.parent

    def close(self) -> None:
        self._db.close()
        self._unlock()

    # --- where the rounds are

    @property
    def number(self) -> int:
        """Of the last round; 0 before the first."""
        return self._db.execute("SELECT COALESCE(MAX(number), 0) FROM round").fetchone()[0]

    def step(self, number: int) -> Step:
        return Step(self._value(number, "step"))

    def is_unfinished(self, number: int) -> bool:
        return number > 0 and bool(NEXT[self.step(number)])

    def plan(self, number: int) -> RoundPlan:
        return parse_plan(self._value(number, "plan"))

    def records(self) -> list[RoundRecord]:
        """Every finished round in order."""
        found = self._db.execute("SELECT number FROM round WHERE step IN (?, ?) ORDER BY number", _FINAL)
        return [self.record(number) for (number,) in found.fetchall()]

    def record(self, number: int) -> RoundRecord:
        row = self._db.execute(
            "SELECT participants, refusals, version, stage, void_reason FROM round WHERE number = ?", (number,)
        ).fetchone()
        participants, refusals, version, stage, void_reason = row
        return RoundRecord(
            number,
            tuple(json.loads(participants or "[]")),
            tuple(Refusal(**refusal) for refusal in json.loads(refusals or "[]")),
            version,
            Stage(stage) if stage else None,
            void_reason,
        )

    # --- the steps

    def open(self, plan: RoundPlan, key: SealingKey, *, now_s: float) -> None:
        """Begin a round, before its plan is shown to anyone; a number is never used twice.

        Raises:
            ValueError: an earlier round is unfinished, or the number was used.
        """
        with self._transaction() as db:
            last = self.number
            if plan.round <= last or self.is_unfinished(last):
                raise ValueError(f"round {plan.round} cannot begin after round {last}, which is {self.step(last)}")
            row = (plan.round, Step.OPEN, plan.payload, self._hidden(key, plan.digest), now_s)
            db.execute("INSERT INTO round (number, step, plan, sealing_key, opened_at_s) VALUES (?, ?, ?, ?, ?)", row)

    def sealing_key(self, number: int) -> SealingKey | None:
        """What updates of the round are sealed to; None where it was erased."""
        hidden = self._value(number, "sealing_key")
        if hidden is None:
            return None
        try:
            nonce, sealed = hidden[:_NONCE_BYTES], hidden[_NONCE_BYTES:]
            raw = self._owners_secret().decrypt(nonce, sealed, self.plan(number).digest.encode())
        except InvalidTag as error:
            raise TrustError(f"rounds.key is not the one {self._path} was written with; restore both") from error
        return SealingKey(X25519PrivateKey.from_private_bytes(raw))

    def keep(self, number: int, site: str, answer: SealedUpdate | Refusal) -> None:
        """Write down what a site answered; raises ValueError where it has answered before."""
        row: tuple[object, ...]
        if isinstance(answer, Refusal):
            row = (json.dumps(asdict(answer)), *[None] * 5)
        else:
            _, *update = astuple(answer)  # its first field is the site
            row = (None, *update)
        with self._transaction() as db:
            if self.step(number) is not Step.OPEN:
                raise ValueError(f"round {number} is {self.step(number)} and takes no answers")
            try:
                db.execute("INSERT INTO answer VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (number, site, *row))
            except sqlite3.IntegrityError as error:
                raise ValueError(f"{site} has answered in round {number}") from error

    def answers(self, number: int) -> dict[str, SealedUpdate | Refusal]:
        """What the sites of an open round have answered."""
        rows = self._db.execute(
            "SELECT site, refusal, plan_digest, ledger_entry, ledger_head, ciphertext, signature "
            "FROM answer WHERE round = ?",
            (number,),
        ).fetchall()
        return {
            site: Refusal(**json.loads(refusal)) if refusal else SealedUpdate(site, *update)
            for site, refusal, *update in rows
        }

    def keep_choice(self, number: int, included: tuple[str, ...]) -> None:
        """Write down whom a secure round is about to sum; the sites remember it, whatever comes of the round."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO choice VALUES (?, ?)", (number, json.dumps(included)))

    def choices(self) -> dict[int, frozenset[str]]:
        """Whom secure rounds summed, or were about to, by round."""
        rows = self._db.execute("SELECT round, included FROM choice").fetchall()
        return {number: frozenset(json.loads(included)) for number, included in rows}

    def combined(self, number: int, aggregate: Aggregate) -> None:
        """The aggregate is stored, and what it was made of is erased."""
        delta = np.ascontiguousarray(aggregate.delta_D, np.float32).tobytes()
        self._advance(
            number,
            Step.COMBINED,
            delta=delta,
            rule=aggregate.rule,
            participants=json.dumps(aggregate.participants),
            refusals=_dumped(aggregate.refusals),
        )

    def aggregate(self, number: int) -> Aggregate:
        """Of a round that is combined and not yet published."""
        record = self.record(number)
        delta_D = np.frombuffer(self._value(number, "delta"), np.float32)
        rule = self._value(number, "rule")
        return Aggregate(self.plan(number).digest, delta_D, record.participants, record.refused, rule)

    def published(self, number: int, version: str) -> None:
        self._advance(number, Step.PUBLISHED, version=version, delta=None)

    def closed(self, number: int, stage: Stage) -> None:
        self._advance(number, Step.CLOSED, stage=stage)

    def void(self, number: int, reason: str, refusals: tuple[Refusal, ...]) -> None:
        """End a round without a result."""
        self._advance(
            number, Step.VOIDED, void_reason=reason, refusals=_dumped(refusals), participants="[]", delta=None
        )

    def forget_keys(self, *, kept: frozenset[int]) -> None:
        """Erase the sealing keys of all other rounds that are finished."""
        with self._transaction() as db:
            keyed = db.execute("SELECT number FROM round WHERE sealing_key IS NOT NULL").fetchall()
            for (number,) in keyed:
                if number not in kept and self.step(number) is not Step.OPEN:
                    db.execute("UPDATE round SET sealing_key = NULL WHERE number = ?", (number,))
        self._wipe()

    # --- who counted, and who may not

    def keyed_rounds(self) -> list[int]:
        """Finished rounds whose updates can still be opened."""
        found = self._db.execute("SELECT number FROM round WHERE sealing_key IS NOT NULL AND step != ?", (Step.OPEN,))
        return [number for (number,) in found.fetchall()]

    def used(self, plan_digest: str) -> frozenset[str]:
        """Sites whose update for this plan is in an aggregate, or may be in a sum."""
        query = (
            "SELECT answer.site FROM answer JOIN round ON answer.round = round.number "
            "WHERE answer.plan_digest = ? AND answer.refusal IS NULL AND round.step NOT IN (?, ?)"
        )
        rows = self._db.execute(query, (plan_digest, Step.OPEN, Step.VOIDED))
        summed = (included for number, included in self.choices().items() if self.plan(number).digest == plan_digest)
        return frozenset(site for (site,) in rows.fetchall()).union(*summed)

    def exclusions(self) -> dict[str, dict[int, Refusal]]:
        """What was held against each site, by round."""
        return self._refused_at(EXCLUDING_STAGES)

    def _refused_at(self, stages: Set[str]) -> dict[str, dict[int, Refusal]]:
        found: dict[str, dict[int, Refusal]] = {}
        rows = self._db.execute("SELECT number, refusals FROM round WHERE refusals IS NOT NULL ORDER BY number")
        for number, refusals in rows.fetchall():
            for refusal in (Refusal(**fields) for fields in json.loads(refusals)):
                if refusal.stage in stages:
                    found.setdefault(refusal.site, {})[number] = refusal
        return found

    def suspended(self) -> dict[str, str]:
        """Sites that take no part in the next round, and why."""
        readmitted = dict(self._db.execute("SELECT site, MAX(after_round) FROM readmission GROUP BY site").fetchall())
        tolerated = tolerated_liars(len(self.plan(self.number).weights)) if self.number else 0
        return suspensions(
            self.exclusions(),
            number=self.number + 1,
            readmitted_after=readmitted,
            selected_at_most=tolerated,
            out=self._refused_at({SUSPENDED}),
        )

    def readmit(self, site: str, *, now_s: float) -> None:
        """Let a suspended site take part again from the next round on; what was held against it is forgiven."""
        with self._transaction(owners=False) as db:
            row = (site, self.number, now_s)
            db.execute("INSERT INTO readmission (site, after_round, at_s) VALUES (?, ?, ?)", row)

    # --- storage

    def _advance(self, number: int, to: Step, **columns: object) -> None:
        with self._transaction() as db:
            step = self.step(number)
            if to not in NEXT[step]:
                raise ValueError(f"round {number} is {step} and cannot be {to}")
            assignments = ", ".join(f"{name} = ?" for name in ("step", *columns))
            update = f"UPDATE round SET {assignments} WHERE number = ?"  # noqa: S608 - columns named in this module
            db.execute(update, (to, *columns.values(), number))
            if step is Step.OPEN:
                db.execute(
                    "UPDATE answer SET ciphertext = NULL, signature = NULL, ledger_head = NULL WHERE round = ?",
                    (number,),
                )
        if step is Step.OPEN:
            self._wipe()

    def _value(self, number: int, column: str) -> Any:
        select = f"SELECT {column} FROM round WHERE number = ?"  # noqa: S608 - a column named in this module
        row = self._db.execute(select, (number,)).fetchone()
        if row is None:
            raise ValueError(f"there is no round {number}")
        return row[0]

    def _owners_secret(self) -> AESGCM:
        if self._secret is None:
            raise ConfigError("the round log was opened to look; only its owner runs rounds and opens keys")
        return self._secret

    def _hidden(self, key: SealingKey, plan_digest: str) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._owners_secret().encrypt(nonce, key.private.private_bytes_raw(), plan_digest.encode())

    @contextmanager
    def _transaction(self, *, owners: bool = True) -> Iterator[sqlite3.Connection]:
        if owners:
            self._owners_secret()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise TransportError(
                f"the round log {self._path} was not written ({error}); free the disk and start again: "
                "the round goes on where it stopped"
            ) from error

    def _wipe(self) -> None:
        """Take erased values out of the files, too, and give their room back."""
        try:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error:  # someone looks at the log just now; the next erasure wipes it
            return

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


_FINAL = tuple(step for step, following in NEXT.items() if not following)


def _dumped(refusals: tuple[Refusal, ...]) -> str:
    return json.dumps([asdict(refusal) for refusal in refusals])


def _locked(folder: Path) -> ProcessLock:
    return ProcessLock(folder / "rounds.lock", refusal=f"another process runs the rounds of {folder}; end it first")


def _opened(path: Path) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_mode & 0o077:
            raise TrustError(f"{path} can be read by others; run: chmod 600 {path}")
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
            db.execute(f"PRAGMA {pragma}").fetchall()
        if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("its pages do not check")
        db.executescript(_SCHEMA)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"the round log {path} cannot be opened ({error}); restore it from its backup: "
            "without it rounds would begin at 1 again, and every site refuses a round it was charged for"
        ) from error
    return db
