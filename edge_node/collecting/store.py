"""The site's trajectories on disk: one SQLite file per hour, every payload encrypted.

Payloads are protobuf under AES-256-GCM with the site's key, bound to their row's
time and id, so rows cannot be exchanged. Beside them stands, in the open, which are
committed, so that a commit decrypts only the others. Deleting an hour is deleting a file.
Records do not change, except that what is said about them later is added.
What a full disk refuses is reported and leaves earlier records intact.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.errors import TransportError, TrustError
from common.telemetry import log_event
from edge_node.collecting.trajectory_pb2 import Feedback, Trajectory

logger = logging.getLogger("headwater.edge")

_HOUR_FORMAT = "%Y-%m-%dT%H"
_NONCE_BYTES = 12

_NAMED = "SELECT id, collected_at_s, payload FROM trajectory WHERE id = ? OR (id > ? AND id < ?)"
_BETWEEN = "SELECT id, collected_at_s, payload FROM trajectory WHERE collected_at_s > ? AND collected_at_s <= ?"
_UNCOMMITTED = f"{_BETWEEN} AND NOT committed"


class TrajectoryStore:
    """Append and read; safe to use from several threads.

    Args:
        folder: of the hourly files; made readable by the owner only.
        key: 32 bytes that never leave the site.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._cipher = AESGCM(key)
        self._lock = threading.Lock()
        self._open: tuple[str, sqlite3.Connection] | None = None

    def append(self, trajectories: Iterable[Trajectory], *, now: Callable[[], float] | None = None) -> None:
        """Store the choices of one request together, all or none.

        Args:
            now: gives the time of their collection, once nobody can read before they are there: who has read up to
                a time has read all of it. None for the time they have.
        Raises:
            TransportError: the disk did not take them.
        """
        batch = list(trajectories)
        if not batch:
            return
        with self._lock:
            collected_at_s = batch[0].collected_at_s if now is None else now()
            for trajectory in batch:
                trajectory.collected_at_s = collected_at_s
            try:
                db = self._hour(collected_at_s)
                with db:
                    db.executemany(
                        "INSERT INTO trajectory (id, collected_at_s, payload, committed) VALUES (?, ?, ?, ?)",
                        [(t.id, collected_at_s, self._encrypt(t, collected_at_s), t.committed_at_s > 0) for t in batch],
                    )
            except sqlite3.IntegrityError as error:
                raise TransportError("records of these ids are stored already; nothing was stored") from error
            except (sqlite3.Error, OSError) as error:
                raise TransportError(f"trajectories could not be stored: {error}") from error

    def read(self, *, after_s: float, until_s: float) -> Iterator[Trajectory]:
        """Trajectories collected in (after_s, until_s], oldest first.

        Raises:
            TrustError: a record does not decrypt: wrong key, or altered.
        """
        first_hour, last_hour = _hour_name(after_s), _hour_name(until_s)
        with self._lock:  # an hour that is being begun is one of them
            files = sorted(self._folder.glob("*.sqlite"))
        for file in files:
            if first_hour <= file.stem <= last_hour:
                for row_id, collected_at_s, payload in self._rows(file, _BETWEEN, (after_s, until_s)):
                    yield self._decrypt(row_id, collected_at_s, payload)

    def _rows(self, file: Path, query: str, window_s: tuple[float, float]) -> list[tuple[str, float, bytes]]:
        """Rows of one hour; none, and a line in the log, where its file is damaged or was never begun."""
        with self._lock:
            db = sqlite3.connect(file)
            try:
                if query == _UNCOMMITTED:
                    _bring_up_to_date(db)
                return db.execute(f"{query} ORDER BY rowid", window_s).fetchall()
            except sqlite3.Error as error:
                self._skip(file, error)
                return []
            finally:
                db.close()

    def add_feedback(self, name: str, feedback: Feedback) -> int:
        """Append feedback to the trajectory of this id, or to all answers to the request of this id.

        The answers to a request lie in one file and change together or not at all. Hours are searched from
        the newest, up to the first that has the id. The caller removes what the policy forbids from the
        feedback's texts first.

        Returns:
            How many trajectories it was added to; 0 where none has this id.
        Raises:
            ValueError: a rating or implicit signal is not a finite number; nothing was changed.
            TransportError: the disk did not take it.
            TrustError: the record does not decrypt.
        """
        numbers = [feedback.rating, *feedback.implicit.values()]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("ratings and implicit signals must be finite numbers")

        def add(trajectory: Trajectory) -> bool:
            trajectory.feedback.append(feedback)
            return True

        return self.edit(name, add)

    def find(self, names: Iterable[str]) -> dict[str, list[Trajectory]]:
        """Of each name, the trajectory of this id or all answers to the request of this id.

        Hours are searched from the newest, each name up to the first that has it; names that nothing has are
        left out.

        Raises:
            TrustError: a record does not decrypt.
        """
        missing, found = set(names), dict[str, list[Trajectory]]()
        for file in sorted(self._folder.glob("*.sqlite"), reverse=True):
            if not missing:
                break
            for name, rows in self._named(file, missing).items():
                here = [t for row in rows if name in ((t := self._decrypt(*row)).id, t.request_id)]
                if here:
                    found[name] = here
                    missing.discard(name)
        return found

    def edit(self, name: str, change: Callable[[Trajectory], bool]) -> int:
        """Change the trajectory of this id, or all answers to the request of this id, together or not at all.

        Args:
            change: edits a trajectory in place and says whether it did; what it adds is free of what the
                policy forbids.
        Returns:
            How many trajectories have this name, changed or not, in the newest hour that has it.
        Raises:
            TransportError: the disk did not take it.
            TrustError: the record does not decrypt.
        """
        named = 0

        def change_named(trajectory: Trajectory) -> bool:
            nonlocal named
            if name not in (trajectory.id, trajectory.request_id):
                return False
            named += 1
            return change(trajectory)

        for file in sorted(self._folder.glob("*.sqlite"), reverse=True):
            if self._named(file, [name]).get(name):
                self._edit(file, _NAMED, _names(name), change_named)
            if named:
                break
        return named

    def edit_uncommitted(self, change: Callable[[Trajectory], bool], *, after_s: float, until_s: float) -> int:
        """Change trajectories collected in (after_s, until_s] that are not committed; how many were changed.

        Each hour is changed whole or not at all.

        Args:
            change: as for `edit`; called again on the same record where it changed it.
        Raises:
            TransportError: the disk did not take it; earlier hours are changed.
            TrustError: a record does not decrypt.
        """
        first_hour, last_hour, changed = _hour_name(after_s), _hour_name(until_s), 0
        for file in sorted(self._folder.glob("*.sqlite")):
            if not first_hour <= file.stem <= last_hour:
                continue
            rows = self._rows(file, _UNCOMMITTED, (after_s, until_s))
            wanted = {t.id for t in (self._decrypt(*row) for row in rows) if change(t)}

            def change_wanted(trajectory: Trajectory, wanted: set[str] = wanted) -> bool:
                return trajectory.id in wanted and change(trajectory)

            if wanted:
                changed += self._edit(file, _UNCOMMITTED, (after_s, until_s), change_wanted)
        return changed

    def _edit(
        self,
        file: Path,
        query: str,
        parameters: tuple[str | float, ...],
        change: Callable[[Trajectory], bool],
    ) -> int:
        """Change rows of one hour, all or none; how many were changed."""
        rows = []
        with self._lock:
            if not file.exists():  # purged meanwhile
                return 0
            try:
                with closing(_existing(file)) as db, db:
                    _bring_up_to_date(db)
                    db.execute("BEGIN IMMEDIATE")
                    for row_id, collected_at_s, payload in db.execute(query, parameters).fetchall():
                        trajectory = self._decrypt(row_id, collected_at_s, payload)
                        if change(trajectory):
                            committed = trajectory.committed_at_s > 0
                            rows.append((self._encrypt(trajectory, collected_at_s), committed, row_id))
                    db.executemany("UPDATE trajectory SET payload = ?, committed = ? WHERE id = ?", rows)
            except (sqlite3.Error, OSError) as error:
                raise TransportError(f"records could not be changed: {error}") from error
        return len(rows)

    def _named(self, file: Path, names: Iterable[str]) -> dict[str, list[tuple[str, float, bytes]]]:
        """Rows of one hour by name; none where its file is damaged, was never begun or just purged."""
        with self._lock:
            try:
                with closing(_existing(file)) as db:
                    return {name: db.execute(_NAMED, _names(name)).fetchall() for name in names}
            except sqlite3.Error as error:
                self._skip(file, error)
                return {}

    @staticmethod
    def _skip(file: Path, error: sqlite3.Error) -> None:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
            raise TransportError(f"{file.name} cannot be used now: {error}; try again") from error
        log_event(logger, "hour skipped", reason=f"{file.name}: {error}")

    def purge(self, *, before_s: float) -> int:
        """Delete the files of hours that ended before a time; how many were deleted."""
        deleted = 0
        with self._lock:
            for file in sorted(self._folder.glob("*.sqlite")):
                if file.stem < _hour_name(before_s):
                    if self._open is not None and self._open[0] == file.stem:
                        self._close()
                    for path in (file, *self._folder.glob(f"{file.name}-*")):
                        path.unlink(missing_ok=True)
                    deleted += 1
        return deleted

    def close(self) -> None:
        with self._lock:
            self._close()

    def _hour(self, time_s: float) -> sqlite3.Connection:
        name = _hour_name(time_s)
        if self._open is None or self._open[0] != name:
            self._close()
            path = self._folder / f"{name}.sqlite"
            db = sqlite3.connect(path, check_same_thread=False)
            try:
                path.chmod(0o600)
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.execute(
                    "CREATE TABLE IF NOT EXISTS trajectory (id TEXT PRIMARY KEY, collected_at_s REAL NOT NULL, "
                    "payload BLOB NOT NULL, committed INTEGER NOT NULL DEFAULT 0)"
                )
                _bring_up_to_date(db)
            except sqlite3.Error:
                db.close()
                raise
            self._open = (name, db)
        return self._open[1]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _encrypt(self, trajectory: Trajectory, collected_at_s: float) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        bound_to = _bound_to(trajectory.id, collected_at_s)
        return nonce + self._cipher.encrypt(nonce, trajectory.SerializeToString(), bound_to)

    def _decrypt(self, row_id: str, collected_at_s: float, payload: bytes) -> Trajectory:
        try:
            plain = self._cipher.decrypt(
                payload[:_NONCE_BYTES], payload[_NONCE_BYTES:], _bound_to(row_id, collected_at_s)
            )
        except (InvalidTag, ValueError, TypeError) as error:
            raise TrustError(f"trajectory {row_id} does not decrypt: wrong key, or altered") from error
        return Trajectory.FromString(plain)


_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
}
"""What is no damage of the file: its records are there, and skipping them would lose them without a word."""


def _bring_up_to_date(db: sqlite3.Connection) -> None:
    """An hour written before commits were noted beside the payload counts as not committed, and is looked into."""
    columns = {column for _, column, *_ in db.execute("PRAGMA table_info(trajectory)")}
    if columns and "committed" not in columns:
        db.execute("ALTER TABLE trajectory ADD COLUMN committed INTEGER NOT NULL DEFAULT 0")


def _hour_name(time_s: float) -> str:
    return datetime.fromtimestamp(max(time_s, 0.0), UTC).strftime(_HOUR_FORMAT)


def _existing(file: Path) -> sqlite3.Connection:
    """Opens an hour without beginning one that was purged meanwhile."""
    return sqlite3.connect(f"{file.resolve().as_uri()}?mode=rw", uri=True)


def _names(name: str) -> tuple[str, str, str]:
    """For `_NAMED`: a trajectory of this id, or `<id>-<choice>`; '.' comes after '-'."""
    return name, f"{name}-", f"{name}."


def _bound_to(row_id: str, collected_at_s: float) -> bytes:
    return f"headwater/trajectory/{row_id}/{collected_at_s!r}".encode()
