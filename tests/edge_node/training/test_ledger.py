"""The ledger refuses, survives kill -9, and notices every edit."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from common.accounting import PrivateSteps, epsilon
from common.errors import PrivacyError, TransportError, TrustError
from common.identity import SigningKey, load_or_create_signing_key
from edge_node.training.ledger import Charge, Ledger

DELTA = 1e-5
EVENT = PrivateSteps(1.2, 0.5, 2)


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return load_or_create_signing_key(tmp_path / "identity.pem")


def charge(ledger: Ledger, number: int, *, total: float = 8.0) -> str:
    return ledger.charge(
        Charge("training", f"test/{number}", f"{number:064x}", EVENT), epsilon_total=total, delta=DELTA
    )


def test_charges_add_up_and_survive_reopening(tmp_path: Path, key: SigningKey) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", key)
    assert ledger.epsilon_spent(DELTA) == 0.0
    entries = {charge(ledger, 1), charge(ledger, 2)}
    assert len(entries) == 2
    ledger.close()
    reopened = Ledger(tmp_path / "ledger.sqlite", key)
    assert reopened.epsilon_spent(DELTA) == epsilon([EVENT, EVENT], delta=DELTA)
    assert (tmp_path / "ledger.sqlite").stat().st_mode & 0o077 == 0


def test_refuses_what_the_budget_does_not_hold_and_says_what_is_left(tmp_path: Path, key: SigningKey) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", key)
    charge(ledger, 1)
    total = epsilon([EVENT, EVENT], delta=DELTA) - 0.01
    with pytest.raises(PrivacyError, match=r"needs epsilon .* is left; raise epsilon_total"):
        charge(ledger, 2, total=total)
    assert len(ledger.charges()) == 1


def test_a_round_is_charged_once(tmp_path: Path, key: SigningKey) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", key)
    charge(ledger, 1)
    with pytest.raises(PrivacyError, match="charged before"):
        charge(ledger, 1)


_CHARGE_THEN_DIE = """
import os, signal, sys
from pathlib import Path
from tests.edge_node.training.test_ledger import charge
from common.identity import load_or_create_signing_key
from edge_node.training.ledger import Ledger
folder = Path(sys.argv[1])
charge(Ledger(folder / "ledger.sqlite", load_or_create_signing_key(folder / "identity.pem")), 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_has_spent_what_it_charged(tmp_path: Path, key: SigningKey) -> None:
    died = subprocess.run([sys.executable, "-c", _CHARGE_THEN_DIE, str(tmp_path)], cwd=Path.cwd(), env=os.environ)
    assert died.returncode == -signal.SIGKILL
    ledger = Ledger(tmp_path / "ledger.sqlite", key)
    assert len(ledger.charges()) == 1
    with pytest.raises(PrivacyError, match="charged before"):
        charge(ledger, 1)


@pytest.mark.parametrize(
    "edit",
    [
        "DELETE FROM entry WHERE sequence = 3",
        "DELETE FROM entry",
        """UPDATE entry SET body = replace(body, '"steps":2', '"steps":1') WHERE sequence = 2""",
        "DELETE FROM entry WHERE sequence = 2",
        "DELETE FROM entry WHERE sequence = 1",
        "UPDATE entry SET signature = zeroblob(64) WHERE sequence = 1",
        "UPDATE entry SET sequence = 9 WHERE sequence = 3",
        "INSERT INTO entry SELECT 4, body, digest, signature FROM entry WHERE sequence = 3",
    ],
)
def test_an_edited_ledger_is_noticed(tmp_path: Path, key: SigningKey, edit: str) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", key)
    for number in range(3):
        charge(ledger, number)
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute(edit)
    with pytest.raises(TrustError, match=r"altered|does not verify|was cut"):
        Ledger(tmp_path / "ledger.sqlite", key)


def test_a_deleted_ledger_is_noticed_and_a_damaged_one_too(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, key)
    charge(ledger, 1)
    charge(ledger, 2)
    ledger.close()
    kept = {p: p.read_bytes() for p in tmp_path.glob("ledger.*")}
    for expected, spoil in (
        ("was cut", lambda: path.unlink()),
        ("damaged", lambda: path.write_bytes(b"not a database" * 100)),
        ("head file is missing", lambda: (tmp_path / "ledger.head").unlink()),
        ("head file is damaged", lambda: (tmp_path / "ledger.head").write_bytes(b"\xff")),
        ("does not verify", lambda: (tmp_path / "ledger.head").write_text(f"1 {'0' * 64} {'0' * 128}")),
    ):
        spoil()
        with pytest.raises(TrustError, match=expected):
            Ledger(path, key)
        for file, data in kept.items():
            file.write_bytes(data)
    assert len(Ledger(path, key).charges()) == 2


def test_a_head_that_cannot_be_written_says_that_the_charge_stands(
    tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, key)
    charge(ledger, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edge_node.training.ledger.replace_file", full)
        with pytest.raises(TransportError, match="entry 2 stands"):
            charge(ledger, 2)
        with pytest.raises(TransportError):
            charge(ledger, 3)  # nothing is added while the head is behind
    assert len(ledger.charges()) == 2
    charge(ledger, 3)
    ledger.close()
    assert len(Ledger(path, key).charges()) == 3


def test_a_ledger_that_cannot_be_opened_is_a_trust_error(tmp_path: Path, key: SigningKey) -> None:
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(TrustError, match="training stays off"):
        Ledger(tmp_path / "ledger.sqlite", key)


def test_the_first_charge_fixes_the_mechanism(tmp_path: Path, key: SigningKey) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", key)
    charge(ledger, 1)
    other = Charge("training", "test/2", "2" * 64, PrivateSteps(1.3, 0.5, 2))
    with pytest.raises(PrivacyError, match="first charge fixed"):
        ledger.charge(other, epsilon_total=100.0, delta=DELTA)


def test_two_openers_cannot_charge_one_round_twice(tmp_path: Path, key: SigningKey) -> None:
    one, two = (Ledger(tmp_path / "ledger.sqlite", key) for _ in range(2))
    charge(one, 1)
    with pytest.raises(PrivacyError, match="charged before"):
        charge(two, 1)


def test_another_sites_ledger_is_refused(tmp_path: Path, key: SigningKey) -> None:
    charge(Ledger(tmp_path / "ledger.sqlite", key), 1)
    with pytest.raises(TrustError):
        Ledger(tmp_path / "ledger.sqlite", load_or_create_signing_key(tmp_path / "other.pem"))


def test_a_disk_that_does_not_write_charges_nothing(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, key)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    ledger._db.execute("PRAGMA busy_timeout = 10")
    with pytest.raises(TransportError, match="nothing was charged"):
        charge(ledger, 1)
    blocker.execute("ROLLBACK")
    assert ledger.charges() == []
    charge(ledger, 1)
