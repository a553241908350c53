"""The ledger refuses what the budget does not hold, and notices every edit, copy and step back."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from common.accounting import PrivateSteps, epsilon
from common.errors import HeadwaterError, PrivacyError, TransportError, TrustError
from common.identity import SigningKey
from common.update import LedgerHead
from edge_node.training.ledger import NOT_THIS_SITES, RESTORED, Ledger

DELTA = 1e-5
EVENT = PrivateSteps(3.0, 1.0, 2)
COUNT = PrivateSteps(10.0, 1.0, 1)
BUDGET = {"training": EVENT, "readiness": COUNT}
OUTCOME = "c" * 64


def times(rounds: int) -> float:
    """ε of so many rounds with every mechanism, by the accountant alone."""
    return epsilon([EVENT, COUNT] * rounds, delta=DELTA)


def new_key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


@pytest.fixture
def key() -> SigningKey:
    return new_key()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path, key: SigningKey) -> Iterator[Ledger]:
    ledger = opened(path, key)
    yield ledger
    ledger.close()


def opened(path: Path, key: SigningKey) -> Ledger:
    ledger = Ledger(path, key)
    ledger.open_budget(BUDGET, now_s=100.0, unit="trajectory")
    return ledger


def reserve(
    ledger: Ledger, number: int, *, purpose: str = "training", total: float = 100.0, now_s: float = 100.0
) -> str:
    return ledger.reserve(purpose, f"test/{number}", f"{number:064x}", epsilon_total=total, delta=DELTA, now_s=now_s)


def rows(path: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as db:
        found = db.execute("SELECT * FROM entry ORDER BY sequence").fetchall()
    db.close()
    return found


# --- budget


def test_the_unit_is_fixed_with_the_mechanisms(tmp_path: Path, key: SigningKey) -> None:
    """Otherwise rounds of trajectories would be shown as spent for users."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, key)
    assert ledger.unit == ""
    ledger.open_budget(BUDGET, now_s=100.0, unit="trajectory")
    before = rows(path)
    with pytest.raises(PrivacyError, match=r"counts one trajectory, policy\.toml says user") as error:
        ledger.open_budget(BUDGET, now_s=100.0, unit="user")
    assert error.value.public == "the site's budget was set up for another privacy unit"
    assert rows(path) == before
    ledger.close()
    assert Ledger(path, key).unit == "trajectory"


def test_an_edit_while_the_ledger_is_open_charges_nothing_more(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = opened(path, key)
    reserve(ledger, 1)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE entry SET body = replace(body, 'test/1', 'test/9')")
    with pytest.raises(TrustError, match="altered at entry"):
        reserve(ledger, 2)


def test_rows_cut_while_the_ledger_is_open_are_not_charged_again(tmp_path: Path, key: SigningKey) -> None:
    """Nor may the head of the shorter chain replace the one that shows the cut."""
    path = tmp_path / "ledger.sqlite"
    ledger = opened(path, key)
    reserve(ledger, 1)
    reserve(ledger, 2)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM entry WHERE sequence > 2")
    for _ in range(2):
        with pytest.raises(TrustError, match="was cut before entry"):
            reserve(ledger, 2)
    ledger.close()
    with pytest.raises(TrustError, match="was cut before entry"):
        Ledger(path, key)


def test_what_is_reserved_is_spent_and_survives_reopening(path: Path, key: SigningKey) -> None:
    ledger = opened(path, key)
    assert (ledger.epsilon_spent(DELTA), ledger.charges()) == (0.0, [])
    entries = [reserve(ledger, 1), reserve(ledger, 2), reserve(ledger, 2, purpose="readiness")]
    ledger.commit(entries[0], OUTCOME, now_s=100.0)
    ledger.close()
    again = Ledger(path, key)
    assert again.mechanisms() == BUDGET
    assert [(c.purpose, c.round, c.event, c.at_s) for c in again.charges()] == [
        ("training", "test/1", EVENT, 100.0),
        ("training", "test/2", EVENT, 100.0),
        ("readiness", "test/2", COUNT, 100.0),
    ]
    assert again.epsilon_spent(DELTA) == times(2)
    assert again.epsilon_of_next_round(DELTA) == times(3) - times(2)
    assert len(set(entries)) == 3
    assert set(entries) <= again.entries()
    assert again.signed_head().digest not in again.entries()  # the commit's row is not a charge
    assert path.stat().st_mode & 0o077 == 0


@settings(max_examples=25, deadline=None)
@given(
    orders=st.lists(st.tuples(st.integers(1, 6), st.sampled_from(sorted(BUDGET))), max_size=14),
    room=st.integers(0, 4),
)
def test_no_order_of_requests_spends_more_than_the_budget(orders: list[tuple[int, str]], room: int) -> None:
    total = times(room) + 0.01
    with tempfile.TemporaryDirectory() as folder:
        ledger = opened(Path(folder) / "ledger.sqlite", new_key())
        for number, purpose in orders:
            left = ledger.rounds_left(total, DELTA)
            begun = {charge.round for charge in ledger.charges()}
            assert left == room - len(begun)
            known = (purpose, f"test/{number}") in {(c.purpose, c.round) for c in ledger.charges()}
            fits = f"test/{number}" in begun or left > 0
            try:
                reserve(ledger, number, purpose=purpose, total=total)
                assert fits and not known
            except PrivacyError:
                assert known or not fits
        ran = [charge.event for charge in ledger.charges()]
        assert epsilon(ran, delta=DELTA) <= ledger.epsilon_spent(DELTA) + 0.01 <= total + 0.01
        ledger.close()


def test_a_refusal_says_what_is_needed_what_is_left_and_what_to_do(ledger: Ledger, path: Path) -> None:
    reserve(ledger, 1)
    total = times(2) - 0.01
    before = rows(path)
    with pytest.raises(PrivacyError) as error:
        reserve(ledger, 2, total=total)
    needed, left = times(2) - times(1), total - times(1)
    assert f"needs epsilon {needed:.3f} but {left:.3f} of {total} is left; raise epsilon_total" in str(error.value)
    assert error.value.public == "the site's privacy budget does not hold another round"
    assert rows(path) == before
    reserve(ledger, 1, purpose="readiness", total=total)  # the round was counted whole


def test_a_policy_made_stricter_stops_also_rounds_that_were_begun(ledger: Ledger) -> None:
    reserve(ledger, 1)
    with pytest.raises(PrivacyError, match="needs epsilon"):
        reserve(ledger, 1, purpose="readiness", total=times(1) - 0.01)


def test_the_mechanisms_are_fixed_once(ledger: Ledger, path: Path) -> None:
    ledger.open_budget(dict(reversed(BUDGET.items())), now_s=100.0, unit="trajectory")
    before = rows(path)
    for other in (
        {**BUDGET, "training": PrivateSteps(3.1, 1.0, 2)},
        {**BUDGET, "metrics": COUNT},
        {"training": EVENT},
        {},
    ):
        with pytest.raises(PrivacyError, match=r"first charge fixed .* a new schedule needs a new budget") as error:
            ledger.open_budget(other, now_s=100.0, unit="trajectory")
        assert error.value.public.startswith("the round needs another mechanism")
    assert rows(path) == before
    with pytest.raises(PrivacyError, match="no mechanism for 'metrics'"):
        reserve(ledger, 1, purpose="metrics")


def test_before_a_budget_is_opened_nothing_can_be_charged(path: Path, key: SigningKey) -> None:
    ledger = Ledger(path, key)
    assert (ledger.mechanisms(), ledger.rounds_left(8.0, DELTA), ledger.epsilon_of_next_round(DELTA)) == ({}, 0, 0.0)
    with pytest.raises(PrivacyError, match="open_budget comes first"):
        reserve(ledger, 1)
    assert ledger.charges() == []


def test_a_purpose_is_reserved_once_a_round_whatever_the_plan(ledger: Ledger) -> None:
    reserve(ledger, 1)
    with pytest.raises(PrivacyError, match="charged before"):
        ledger.reserve("training", "test/1", "f" * 64, epsilon_total=100.0, delta=DELTA, now_s=100.0)
    reserve(ledger, 1, purpose="readiness")


def test_two_openers_cannot_charge_one_round_twice(path: Path, key: SigningKey, ledger: Ledger) -> None:
    reserve(ledger, 1)
    with pytest.raises(PrivacyError, match="charged before"):
        reserve(Ledger(path, key), 1)


def test_processes_that_race_charge_each_round_once_and_leave_a_whole_ledger(
    path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_node.training.ledger.epsilon", lambda events, delta: 0.0)
    opened(path, key).close()

    def race() -> None:
        mine = Ledger(path, key)
        for number in range(12):
            with suppress(PrivacyError):
                reserve(mine, number)

    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                race()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    again = Ledger(path, key)
    assert [charge.round for charge in again.charges()] == [f"test/{number}" for number in range(12)]
    assert LedgerHead.parse(path.with_suffix(".head").read_text().strip()) == again.signed_head()


def test_a_reservation_is_committed_once_with_one_outcome(ledger: Ledger, path: Path) -> None:
    entry = reserve(ledger, 1)
    found = ledger.reservation("training", "test/1")
    assert found is not None and (found.entry, found.plan_digest, found.outcome) == (entry, f"{1:064x}", None)
    ledger.commit(entry, OUTCOME, now_s=101.0)
    before = rows(path)
    ledger.commit(entry, OUTCOME, now_s=102.0)
    for bad_entry, outcome, expected in (
        (entry, "d" * 64, "cannot be dddd"),
        (entry, "ready", "cannot be ready"),
        ("0" * 64, OUTCOME, "never reserved"),
        (ledger.signed_head().digest, OUTCOME, "never reserved"),
    ):
        with pytest.raises(PrivacyError, match=expected):
            ledger.commit(bad_entry, outcome, now_s=103.0)
    with pytest.raises(ValueError, match="an outcome is"):
        ledger.commit(entry, "anything", now_s=103.0)
    assert rows(path) == before
    found = ledger.reservation("training", "test/1")
    assert found is not None and found.outcome == OUTCOME
    assert ledger.reservation("training", "test/2") is None
    assert ledger.reservation("readiness", "test/1") is None


@pytest.mark.parametrize("now_s", [99.9, float("nan"), float("inf"), float("-inf")])
def test_a_clock_set_back_writes_nothing(ledger: Ledger, path: Path, key: SigningKey, now_s: float) -> None:
    entry = reserve(ledger, 1, now_s=100.0)
    before = rows(path)
    attempts: list[Callable[[], object]] = [
        lambda: reserve(ledger, 2, now_s=now_s),
        lambda: ledger.commit(entry, OUTCOME, now_s=now_s),
        lambda: ledger.open_budget(BUDGET, now_s=now_s, unit="trajectory"),
    ]
    for attempt in attempts:
        with pytest.raises(TrustError, match=r"set back from 100 to .* correct it") as error:
            attempt()
        assert error.value.public == "this site's clock was set back"
    assert rows(path) == before
    ledger.commit(entry, OUTCOME, now_s=100.0)


# --- files


@pytest.mark.parametrize(
    "edit",
    [
        "DELETE FROM entry WHERE sequence = 5",
        "DELETE FROM entry",
        """UPDATE entry SET body = replace(body, '"steps":2', '"steps":1') WHERE sequence = 1""",
        """UPDATE entry SET body = replace(body, 'test/2', 'test/9') WHERE sequence = 3""",
        """UPDATE entry SET body = replace(body, '100.0', '10.0') WHERE sequence = 3""",
        "UPDATE entry SET body = replace(body, 'cccc', 'dddd') WHERE sequence = 5",
        "DELETE FROM entry WHERE sequence = 3",
        "DELETE FROM entry WHERE sequence = 1",
        "UPDATE entry SET signature = zeroblob(64) WHERE sequence = 1",
        "UPDATE entry SET sequence = 9 WHERE sequence = 5",
        "INSERT INTO entry SELECT 6, body, digest, signature FROM entry WHERE sequence = 4",
    ],
)
def test_an_edited_ledger_is_noticed(path: Path, key: SigningKey, edit: str) -> None:
    ledger = opened(path, key)
    entries = [reserve(ledger, number) for number in (1, 2, 3)]
    ledger.commit(entries[0], OUTCOME, now_s=100.0)
    ledger.close()
    before = rows(path)
    with sqlite3.connect(path) as db:
        db.execute(edit)
    db.close()
    assert rows(path) != before
    with pytest.raises(TrustError, match=r"altered|does not verify|was cut"):
        Ledger(path, key)


def test_missing_damaged_and_truncated_files_are_noticed(
    path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_node.training.ledger.epsilon", lambda events, delta: 0.0)
    ledger = opened(path, key)
    for number in range(20):
        reserve(ledger, number)
    ledger.close()
    head = path.with_suffix(".head")
    kept = {p: p.read_bytes() for p in (path, head)}
    size = path.stat().st_size
    assert size > 8192
    for expected, spoil in (
        ("was cut", lambda: path.unlink()),
        ("was cut", lambda: os.truncate(path, 0)),
        ("damaged", lambda: os.truncate(path, size - 4096)),
        ("damaged", lambda: os.truncate(path, size // 2)),
        ("damaged", lambda: path.write_bytes(b"not a database" * 100)),
        ("head file is missing", lambda: head.unlink()),
        ("head file is damaged", lambda: head.write_bytes(b"\xff")),
        ("head file is damaged", lambda: os.truncate(head, 100)),
        ("does not verify", lambda: head.write_text(f"1 {'0' * 64} {'0' * 128}\n")),
    ):
        spoil()
        with pytest.raises(TrustError, match=expected):
            Ledger(path, key)
        for file in path.parent.iterdir():
            file.unlink()
        for file, data in kept.items():
            file.write_bytes(data)
    again = Ledger(path, key)
    assert len(again.charges()) == 20
    again.close()


def test_another_sites_ledger_is_refused(path: Path, ledger: Ledger) -> None:
    reserve(ledger, 1)
    with pytest.raises(TrustError, match="does not verify"):
        Ledger(path, new_key())


def test_a_ledger_of_an_unknown_kind_is_refused(path: Path, key: SigningKey, ledger: Ledger) -> None:
    for row in (
        {"kind": "refund", "at_s": 100.0},
        {"purpose": "training"},
        {"kind": "commit", "at_s": 1.0, "entry": "0"},
    ):
        copy = path.with_name("copy.sqlite")
        copy.unlink(missing_ok=True)
        other = Ledger(copy, key)
        other._append(row)
        other.close()
        with pytest.raises(TrustError, match="cannot read"):
            Ledger(copy, key)


def test_a_ledger_that_cannot_be_opened_is_a_trust_error(path: Path, key: SigningKey) -> None:
    path.mkdir(parents=True)
    with pytest.raises(TrustError, match="training stays off"):
        Ledger(path, key)


def test_a_locked_ledger_charges_nothing(path: Path, key: SigningKey, ledger: Ledger) -> None:
    entry = reserve(ledger, 1)
    before = rows(path)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    ledger._db.execute("PRAGMA busy_timeout = 10")
    with pytest.raises(TransportError, match=r"was not written .*locked.*; nothing was charged"):
        reserve(ledger, 2)
    with pytest.raises(TransportError, match="nothing was charged"):
        ledger.commit(entry, OUTCOME, now_s=100.0)
    blocker.execute("ROLLBACK")
    assert rows(path) == before
    reserve(ledger, 2)
    blocker.close()


def test_a_ledger_locked_for_good_says_so_at_opening(
    path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(path, key).close()
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("PRAGMA locking_mode = EXCLUSIVE")
    blocker.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    monkeypatch.setattr("edge_node.training.ledger.sqlite3.connect", lambda *a, **k: connect(*a, **k, timeout=0.01))
    with pytest.raises(TransportError, match="locked; end it and try again"):
        Ledger(path, key)
    blocker.close()
    assert Ledger(path, key).mechanisms() == BUDGET


_NOBODY = 65534


def _as_another_user(work: Callable[[], None]) -> str:
    """Run `work` in a process that modes bind (root's are not), and return the error it ended with."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setuid(_NOBODY)
            work()
            text = "no error"
        except HeadwaterError as error:
            text = f"{type(error).__name__}: {error}"
        except BaseException as error:
            text = f"unexpected {error!r}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.parametrize("read_only", ["file", "folder"])
def test_a_read_only_ledger_is_a_clear_error_and_stays_as_it_is(key: SigningKey, read_only: str) -> None:
    folder = Path(tempfile.mkdtemp())
    path = folder / "ledger.sqlite"
    try:
        ledger = opened(path, key)
        reserve(ledger, 1)
        ledger.close()
        kept = {p.name: p.read_bytes() for p in folder.iterdir()}
        for file in (*folder.iterdir(), folder):
            if os.getuid() == 0:
                os.chown(file, _NOBODY, _NOBODY)
        (path if read_only == "file" else folder).chmod(0o440 if read_only == "file" else 0o500)

        def open_and_reserve() -> None:
            reserve(Ledger(path, key), 2)

        found = _as_another_user(open_and_reserve)
        family = "TransportError" if read_only == "file" else "TrustError"
        assert found.startswith(f"{family}: the privacy ledger"), found
        assert "readonly database" in found
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name in kept} == kept
        if read_only == "file":
            assert path.stat().st_mode & 0o777 == 0o400  # taken from the others, not made writable
        folder.chmod(0o700)
        path.chmod(0o600)
        again = Ledger(path, key)
        assert len(again.charges()) == 1
        again.close()
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


def test_a_head_that_cannot_be_written_says_that_the_charge_stands(
    path: Path, key: SigningKey, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(ledger, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edge_node.training.ledger.replace_file", full)
        with pytest.raises(TransportError, match="entry 3 stands"):
            reserve(ledger, 2)
        with pytest.raises(TransportError):
            reserve(ledger, 3)  # nothing is added while the head is behind
    assert len(ledger.charges()) == 2
    reserve(ledger, 3)
    ledger.close()
    assert len(Ledger(path, key).charges()) == 3


# --- witness


def copied(path: Path, name: str) -> Path:
    """The ledger's folder as a backup holds it."""
    shutil.copytree(path.parent, path.parent.with_name(name))
    return path.parent.with_name(name) / path.name


def test_a_head_that_the_chain_still_holds_is_accepted_however_old(ledger: Ledger) -> None:
    heads = [ledger.signed_head()]
    for number in range(3):
        ledger.commit(reserve(ledger, number), OUTCOME, now_s=100.0)
        heads.append(ledger.signed_head())
    assert [head.sequence for head in heads] == [1, 3, 5, 7]
    for head in heads:
        ledger.check_witness(LedgerHead.parse(head.encode()))


def test_a_restored_backup_is_noticed_though_its_files_are_whole(path: Path, key: SigningKey) -> None:
    ledger = opened(path, key)
    reserve(ledger, 1)
    ledger.close()
    backup = copied(path, "backup")
    ledger = Ledger(path, key)
    reserve(ledger, 2)
    seen = ledger.signed_head()
    restored = Ledger(backup, key)  # verifies by itself
    with pytest.raises(TrustError, match="restored backup or a clone that ran on; training stays off") as error:
        restored.check_witness(seen)
    assert error.value.public == RESTORED
    reserve(restored, 2, now_s=200.0)  # a clone that ran on, and is as long
    reserve(restored, 3, now_s=200.0)
    with pytest.raises(TrustError, match="restored backup or a clone") as error:
        restored.check_witness(seen)
    assert error.value.public == RESTORED
    with pytest.raises(TrustError, match="restored backup or a clone"):
        ledger.check_witness(restored.signed_head())
    ledger.check_witness(seen)


def test_a_deleted_ledger_is_noticed_by_its_witness(path: Path, key: SigningKey, ledger: Ledger) -> None:
    seen = ledger.signed_head()
    empty = Ledger(path.with_name("new.sqlite"), key)
    empty.check_witness(empty.signed_head())
    with pytest.raises(TrustError, match="restored backup"):
        empty.check_witness(seen)


def test_a_head_that_others_made_up_is_refused_with_its_own_text(path: Path, ledger: Ledger) -> None:
    real = ledger.signed_head()
    liar = new_key()
    for forged in (
        LedgerHead.signed(99, "0" * 64, liar),
        LedgerHead(99, real.digest, real.signature),
        LedgerHead(real.sequence, "0" * 64, real.signature),
        Ledger(path.with_name("other.sqlite"), liar).signed_head(),
    ):
        with pytest.raises(TrustError) as error:
            ledger.check_witness(forged)
        assert error.value.public == NOT_THIS_SITES
    reserve(ledger, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1 2 3",
        f"-1 {'0' * 64} {'0' * 128}",
        f"01 {'0' * 64} {'0' * 128}",
        f"1 {'0' * 64} {'0' * 128} ",
        f"1 {'0' * 64} {'0' * 128}\n",
        f"{'9' * 17} {'0' * 64} {'0' * 128}",
        f"1 {'A' * 64} {'0' * 128}",
    ],
)
def test_what_is_not_a_head_is_refused(text: str) -> None:
    with pytest.raises(TrustError, match="not the head"):
        LedgerHead.parse(text)


@given(st.integers(0, 10**15), st.text("0123456789abcdef", min_size=64, max_size=64))
def test_a_head_survives_its_text(sequence: int, digest: str) -> None:
    key = new_key()
    head = LedgerHead.signed(sequence, digest, key)
    assert LedgerHead.parse(head.encode()) == head
    head.verify(key.public)
