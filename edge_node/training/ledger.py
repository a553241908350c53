"""The site's privacy ledger: what has been spent, and the right to refuse.

Append-only SQLite, one row per charge, hash-chained and signed with the site's
key, synchronised to disk before the caller goes on. A charge is spent the moment
it is written, whatever happens afterwards. All charges compose over the whole
life of the site, as if every record had been in all of them: an upper bound,
also where training windows are disjoint.

A second file remembers the signed head of the chain, so that cutting rows off or
deleting the ledger is noticed; the node also looks for the entries its finished
updates name. Removing or restoring all of these together is not noticed: that
needs a witness outside the site.

The first charge fixes the mechanism (noise, rate, steps) of all later ones. The
aggregator chooses plans after it has seen updates, and the accountant is only
proven for mechanisms that do not depend on that.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from common.accounting import PrivateSteps, epsilon
from common.errors import PrivacyError, TransportError, TrustError
from common.identity import SigningKey, canonical, replace_file, sha256_hex, verify

ENTRY_LABEL, HEAD_LABEL = "ledger-entry", "ledger-head"
_GENESIS = sha256_hex(b"headwater ledger")


@dataclass(frozen=True)
class Charge:
    """One spend.

    Attributes:
        purpose: what is released (`training`, later `metrics`, `canary`).
        round: federation and number, `name/7`; a round is charged once, whatever its plans.
        plan_digest: the plan it is for.
        event: the mechanism that runs.
    """

    purpose: str
    round: str
    plan_digest: str
    event: PrivateSteps


class Ledger:
    """Opens, verifies and appends to one site's ledger.

    Raises:
        TrustError: a row was changed, removed or not signed by this site, or the file is damaged.
    """

    def __init__(self, path: Path, key: SigningKey) -> None:
        self._key = key
        self._head_file = path.with_suffix(".head")
        self._lock = threading.Lock()
        self._remembered = 0
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            path.chmod(0o600)
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
            raise TrustError(f"the privacy ledger is damaged ({error}); training stays off") from error
        except TrustError:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def charges(self) -> list[Charge]:
        """Every charge in order."""
        rows = self._db.execute("SELECT body FROM entry ORDER BY sequence").fetchall()
        return [_parse(body) for (body,) in rows]

    def holds(self, entry: str) -> bool:
        """Whether a charge with this digest is in the ledger."""
        return self._db.execute("SELECT 1 FROM entry WHERE digest = ?", (entry,)).fetchone() is not None

    def epsilon_spent(self, delta: float) -> float:
        return epsilon((charge.event for charge in self.charges()), delta=delta)

    def charge(self, charge: Charge, *, epsilon_total: float, delta: float) -> str:
        """Write a charge and return its digest; after this the caller may run the mechanism.

        Raises:
            PrivacyError: the round was charged before, the mechanism is not that of the first
                charge, or the total would exceed `epsilon_total`.
            TransportError: the disk did not take it; the message says whether the charge stands.
        """
        with self._lock:
            self._remember_head()  # of the last charge, if that failed: the chain is never two ahead of its head
            try:
                self._db.execute("BEGIN IMMEDIATE")  # what is checked is what is added to
                self._check(charge, epsilon_total=epsilon_total, delta=delta)
                digest = self._append(canonical(asdict(charge)).decode())
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise TransportError(f"the privacy ledger was not written: {error}; nothing was charged") from error
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            self._remember_head()
            return digest

    def verify(self) -> None:
        """Walk the chain; raises TrustError at the first row that does not hold."""
        previous = _GENESIS
        rows = self._db.execute("SELECT sequence, body, digest, signature FROM entry ORDER BY sequence").fetchall()
        for expected, (sequence, body, digest, signature) in enumerate(rows, start=1):
            if sequence != expected or digest != _chain(previous, sequence, body):
                raise TrustError(f"the privacy ledger was altered at entry {expected}; training stays off")
            verify(self._key.public, ENTRY_LABEL, digest.encode(), signature)
            previous = digest
        self._check_head()

    def _check(self, charge: Charge, *, epsilon_total: float, delta: float) -> None:
        earlier = self.charges()
        if any(charge.round == other.round for other in earlier):
            raise PrivacyError(
                "this round was charged before; its stored update may be sent again, new noise may not",
                public="this round was charged before and its update is gone",
            )
        if earlier and earlier[0].event != charge.event:
            raise PrivacyError(
                f"the first charge fixed {earlier[0].event}, this plan needs {charge.event}; "
                "a new schedule needs a new budget",
                public="the plan's sampling rate or steps differ from those the budget was set up for",
            )
        spent = epsilon((other.event for other in earlier), delta=delta)
        after = epsilon((other.event for other in [*earlier, charge]), delta=delta)
        if after > epsilon_total:
            raise PrivacyError(
                f"this round needs epsilon {after - spent:.3f} but {max(0.0, epsilon_total - spent):.3f} "
                f"of {epsilon_total} is left; raise epsilon_total in policy.toml or stop training",
                public="the site's privacy budget does not hold another round",
            )

    def _append(self, body: str) -> str:
        last, previous = self._head()
        sequence = last + 1
        digest = _chain(previous, sequence, body)
        signature = self._key.sign(ENTRY_LABEL, digest.encode())
        self._db.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (sequence, body, digest, signature))
        return digest

    def _head(self) -> tuple[int, str]:
        """Sequence and digest of the last row."""
        last = self._db.execute("SELECT sequence, digest FROM entry ORDER BY sequence DESC LIMIT 1").fetchone()
        return (last[0], last[1]) if last else (0, _GENESIS)

    def _remember_head(self) -> None:
        sequence, digest = self._head()
        if sequence == 0 or sequence == self._remembered:
            return
        signature = self._key.sign(HEAD_LABEL, f"{sequence} {digest}".encode())
        try:
            replace_file(self._head_file, f"{sequence} {digest} {signature.hex()}\n".encode())
        except OSError as error:  # the charge stands; opening allows a head that is behind
            raise TransportError(f"entry {sequence} stands, but the ledger's head was not written") from error
        self._remembered = sequence

    def _check_head(self) -> None:
        """The chain still holds the row that was its head; raises TrustError where it was cut."""
        if not self._head_file.exists():
            if self._head()[0] > 1:
                raise TrustError("the privacy ledger's head file is missing; training stays off")
            return
        try:
            sequence, digest, signature = self._head_file.read_text().split()
            signed, number = bytes.fromhex(signature), int(sequence)
        except (ValueError, OSError) as error:
            raise TrustError("the privacy ledger's head file is damaged; training stays off") from error
        verify(self._key.public, HEAD_LABEL, f"{sequence} {digest}".encode(), signed)
        row = self._db.execute("SELECT digest FROM entry WHERE sequence = ?", (number,)).fetchone()
        if row is None or row[0] != digest:
            raise TrustError(f"the privacy ledger was cut before entry {sequence}; training stays off")


def _chain(previous: str, sequence: int, body: str) -> str:
    return sha256_hex(f"{previous}\n{sequence}\n{body}".encode())


def _parse(body: str) -> Charge:
    fields = json.loads(body)
    return Charge(**{**fields, "event": PrivateSteps(**fields["event"])})
