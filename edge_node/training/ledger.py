"""The site's privacy ledger: what has been spent, and the right to refuse.

Append-only SQLite, one row per charge, hash-chained and signed with the site's
key, synchronised to disk before the caller goes on. A charge is spent the moment
it is written, whatever happens afterwards. All charges compose over the whole
life of the site, as if every record had been in all of them: an upper bound,
also where training windows are disjoint.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from common.accounting import PrivateSteps, epsilon
from common.errors import PrivacyError, TransportError, TrustError
from common.identity import SigningKey, canonical, sha256_hex, verify

LABEL = "ledger-entry"
_GENESIS = sha256_hex(b"headwater ledger")


@dataclass(frozen=True)
class Charge:
    """One spend.

    Attributes:
        purpose: what is released (`training`, later `metrics`, `canary`).
        plan_digest: the round it is for; a round is charged once.
        event: the mechanism that runs.
    """

    purpose: str
    plan_digest: str
    event: PrivateSteps


class Ledger:
    """Opens, verifies and appends to one site's ledger.

    Raises:
        TrustError: a row was changed, removed or not signed by this site.
    """

    def __init__(self, path: Path, key: SigningKey) -> None:
        self._key = key
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS entry ("
            "sequence INTEGER PRIMARY KEY, body TEXT NOT NULL, digest TEXT NOT NULL, signature BLOB NOT NULL)"
        )
        self.verify()

    def close(self) -> None:
        self._db.close()

    def charges(self) -> list[Charge]:
        """Every charge in order."""
        rows = self._db.execute("SELECT body FROM entry ORDER BY sequence").fetchall()
        return [_parse(body) for (body,) in rows]

    def epsilon_spent(self, delta: float) -> float:
        return epsilon((charge.event for charge in self.charges()), delta=delta)

    def charge(self, charge: Charge, *, epsilon_total: float, delta: float) -> str:
        """Write a charge and return its digest; after this the caller may run the mechanism.

        Raises:
            PrivacyError: the round was charged before, or the total would exceed `epsilon_total`.
            TransportError: the disk did not take it; nothing was charged.
        """
        with self._lock:
            earlier = self.charges()
            if any(charge.plan_digest == other.plan_digest for other in earlier):
                raise PrivacyError(
                    "this round was charged before; its stored update may be sent again, new noise may not"
                )
            spent = epsilon((other.event for other in earlier), delta=delta)
            after = epsilon((other.event for other in [*earlier, charge]), delta=delta)
            if after > epsilon_total:
                raise PrivacyError(
                    f"this round needs epsilon {after - spent:.3f} but {max(0.0, epsilon_total - spent):.3f} "
                    f"of {epsilon_total} is left; raise epsilon_total in policy.toml or stop training"
                )
            return self._append(canonical(asdict(charge)).decode())

    def verify(self) -> None:
        """Walk the chain; raises TrustError at the first row that does not hold."""
        previous = _GENESIS
        for expected, row in enumerate(
            self._db.execute("SELECT sequence, body, digest, signature FROM entry ORDER BY sequence"), start=1
        ):
            sequence, body, digest, signature = row
            if sequence != expected or digest != _chain(previous, sequence, body):
                raise TrustError(f"the privacy ledger was altered at entry {expected}; training stays off")
            verify(self._key.public, LABEL, digest.encode(), signature)
            previous = digest

    def _append(self, body: str) -> str:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            last = self._db.execute("SELECT sequence, digest FROM entry ORDER BY sequence DESC LIMIT 1").fetchone()
            sequence, previous = (last[0] + 1, last[1]) if last else (1, _GENESIS)
            digest = _chain(previous, sequence, body)
            signature = self._key.sign(LABEL, digest.encode())
            self._db.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (sequence, body, digest, signature))
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise TransportError(f"the privacy ledger could not be written: {error}; nothing was charged") from error
        return digest


def _chain(previous: str, sequence: int, body: str) -> str:
    return sha256_hex(f"{previous}\n{sequence}\n{body}".encode())


def _parse(body: str) -> Charge:
    fields = json.loads(body)
    return Charge(**{**fields, "event": PrivateSteps(**fields["event"])})
