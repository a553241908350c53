"""The round log: steps in order, answers once, secrets hidden and erased, one owner."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.round_log import NEXT, RoundLog, Step
from common.errors import ConfigError, TransportError, TrustError
from common.identity import SealingKey
from common.plan import RoundPlan
from common.update import Aggregate, Refusal, SealedUpdate
from model_hub.rollout import Stage
from tests.common.test_update import plan

CIPHERTEXT = b"ciphertext of site one" * 8
REFUSAL = Refusal("site-2", "validate", "norm 20 exceeds the plan's clip 2")


def numbered(number: int) -> tuple[RoundPlan, SealingKey]:
    key = SealingKey(X25519PrivateKey.generate())
    return plan(round=number, planned_rounds=100, sealing_key=key.public.hex()), key


def sealed(site: str, plan_digest: str) -> SealedUpdate:
    return SealedUpdate(site, plan_digest, "e" * 64, "", CIPHERTEXT, b"s" * 64)


def aggregate(plan_digest: str, *refusals: Refusal) -> Aggregate:
    return Aggregate(plan_digest, np.arange(14, dtype=np.float32), ("site-1",), refusals, "mean")


def open_round(log: RoundLog, number: int) -> tuple[RoundPlan, SealingKey]:
    made, key = numbered(number)
    log.open(made, key, now_s=1.0)
    return made, key


def finish(log: RoundLog, number: int, *refusals: Refusal) -> RoundPlan:
    made, _ = open_round(log, number)
    log.keep(number, "site-1", sealed("site-1", made.digest))
    log.combined(number, aggregate(made.digest, *refusals))
    log.published(number, f"v{number}")
    log.closed(number, Stage.STABLE)
    return made


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RoundLog]:
    log = RoundLog(tmp_path / "aggregator")
    yield log
    log.close()


def test_what_was_written_is_there_after_a_restart(log: RoundLog, tmp_path: Path) -> None:
    made, key = open_round(log, 1)
    update = sealed("site-1", made.digest)
    log.keep(1, "site-1", update)
    log.keep(1, "site-2", REFUSAL)
    log.close()
    again = RoundLog(tmp_path / "aggregator")
    assert (again.number, again.step(1), again.plan(1)) == (1, Step.OPEN, made)
    assert again.answers(1) == {"site-1": update, "site-2": REFUSAL}
    found = again.sealing_key(1)
    assert found is not None and found.public == key.public
    again.combined(1, aggregate(made.digest, REFUSAL))
    np.testing.assert_array_equal(again.aggregate(1).delta_D, aggregate(made.digest).delta_D)
    assert again.aggregate(1).refusals == (REFUSAL,)
    again.close()


def test_a_site_answers_once(log: RoundLog) -> None:
    made, _ = open_round(log, 1)
    first = sealed("site-1", made.digest)
    log.keep(1, "site-1", first)
    with pytest.raises(ValueError, match="site-1 has answered in round 1"):
        log.keep(1, "site-1", dataclasses.replace(first, ciphertext=b"another"))
    with pytest.raises(ValueError, match="has answered"):
        log.keep(1, "site-1", REFUSAL)
    assert log.answers(1) == {"site-1": first}


def test_a_number_is_used_once_and_only_after_the_last_round_ended(log: RoundLog) -> None:
    open_round(log, 3)
    for number in (1, 3, 4):
        with pytest.raises(ValueError, match="cannot begin after round 3, which is open"):
            open_round(log, number)
    log.void(3, "too few", ())
    with pytest.raises(ValueError, match="cannot begin"):
        open_round(log, 3)
    open_round(log, 4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(list(Step)), min_size=1, max_size=5))
def test_steps_follow_the_table_and_a_refused_one_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    log = RoundLog(tmp_path_factory.mktemp("log"))
    made, _ = open_round(log, 1)
    moves = {
        Step.COMBINED: lambda: log.combined(1, aggregate(made.digest)),
        Step.PUBLISHED: lambda: log.published(1, "v1"),
        Step.CLOSED: lambda: log.closed(1, Stage.STABLE),
        Step.VOIDED: lambda: log.void(1, "too few", ()),
        Step.OPEN: lambda: log.open(made, SealingKey(X25519PrivateKey.generate()), now_s=2.0),
    }
    at = Step.OPEN
    for step in steps:
        before = log.record(1)
        if step in NEXT[at]:
            moves[step]()
            at = step
        else:
            with pytest.raises(ValueError, match="cannot be"):
                moves[step]()
            assert log.record(1) == before
        assert log.step(1) is at
        assert log.is_unfinished(1) is bool(NEXT[at])
    log.close()


def test_answers_come_only_to_an_open_round(log: RoundLog) -> None:
    made, _ = open_round(log, 1)
    log.combined(1, aggregate(made.digest))
    with pytest.raises(ValueError, match="takes no answers"):
        log.keep(1, "site-1", sealed("site-1", made.digest))


def test_nobody_else_can_read_it_and_no_key_lies_in_it(log: RoundLog, tmp_path: Path) -> None:
    _, key = open_round(log, 1)
    folder = tmp_path / "aggregator"
    secret = key.private.private_bytes_raw()
    for file in folder.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
        assert secret not in file.read_bytes()
    assert {f.name for f in folder.iterdir()} >= {"rounds.sqlite", "rounds.key", "rounds.lock"}


def test_what_a_combined_round_was_made_of_is_gone_from_the_files(log: RoundLog, tmp_path: Path) -> None:
    made, _ = open_round(log, 1)
    log.keep(1, "site-1", sealed("site-1", made.digest))
    folder = tmp_path / "aggregator"
    assert any(CIPHERTEXT in f.read_bytes() for f in folder.iterdir())
    log.combined(1, aggregate(made.digest))
    hidden = sqlite3.connect(folder / "rounds.sqlite").execute("SELECT sealing_key FROM round").fetchone()[0]
    log.forget_keys(kept=frozenset())
    assert log.sealing_key(1) is None
    for file in folder.iterdir():
        assert CIPHERTEXT not in file.read_bytes()
        assert hidden not in file.read_bytes()


def test_the_key_of_an_open_round_and_of_those_still_taken_is_kept(log: RoundLog) -> None:
    finish(log, 1)
    finish(log, 2)
    open_round(log, 3)
    log.forget_keys(kept=frozenset({2}))
    assert [log.sealing_key(number) is not None for number in (1, 2, 3)] == [False, True, True]
    assert log.keyed_rounds() == [2]


def test_an_update_is_used_once_it_is_in_an_aggregate_and_not_by_a_voided_round(log: RoundLog) -> None:
    made, _ = open_round(log, 1)
    log.keep(1, "site-1", sealed("site-1", made.digest))
    log.keep(1, "site-2", REFUSAL)
    assert log.used(made.digest) == frozenset()
    log.void(1, "too few", (REFUSAL,))
    assert log.used(made.digest) == frozenset()
    later, _ = open_round(log, 2)
    log.keep(2, "site-1", sealed("site-1", made.digest))  # handed over again for the next round
    log.combined(2, aggregate(later.digest))
    assert log.used(made.digest) == frozenset({"site-1"})
    assert log.used(later.digest) == frozenset()
    log.published(2, "v1")
    log.closed(2, Stage.STABLE)
    summed, _ = open_round(log, 3)
    log.keep_choice(3, ("site-1", "site-3"))  # a secure round: its updates never stood here alone
    log.void(3, "killed", ())
    assert log.used(summed.digest) == frozenset({"site-1", "site-3"})


def test_one_process_owns_it_and_others_may_look_and_readmit(log: RoundLog, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        finish(log, number, REFUSAL)
    program = (
        "import sys; from pathlib import Path; from aggregator.round_log import RoundLog\n"
        "from common.errors import ConfigError\n"
        "folder = Path(sys.argv[1])\n"
        "try: RoundLog(folder)\n"
        "except ConfigError as error: print(error)\n"
        "log = RoundLog(folder, owned=False); print(list(log.suspended())); log.readmit('site-2', now_s=1.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "aggregator")], capture_output=True, text=True, timeout=60
    )
    assert "another process runs the rounds" in done.stdout, done.stderr
    assert "['site-2']" in done.stdout
    assert log.suspended() == {}


def test_who_only_looks_cannot_begin_a_round_or_read_a_key(log: RoundLog, tmp_path: Path) -> None:
    open_round(log, 1)
    looking = RoundLog(tmp_path / "aggregator", owned=False)
    with pytest.raises(ConfigError, match="only its owner"):
        looking.sealing_key(1)
    with pytest.raises(ConfigError, match="only its owner"):
        looking.open(*numbered(2), now_s=1.0)
    looking.close()


@pytest.mark.parametrize("damage", [b"", b"not a database, but something long enough to be read as one" * 50])
def test_a_damaged_log_is_refused_and_stays_as_it_is(tmp_path: Path, damage: bytes) -> None:
    log = RoundLog(tmp_path / "a")
    finish(log, 1)
    log.close()
    path = tmp_path / "a" / "rounds.sqlite"
    good = path.read_bytes()
    path.write_bytes(damage or good[: len(good) // 2])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="restore it from its backup"):
        RoundLog(tmp_path / "a")
    assert path.read_bytes() == before
    path.write_bytes(good)
    again = RoundLog(tmp_path / "a")
    assert again.number == 1
    again.close()


def test_a_log_that_others_can_read_is_refused(tmp_path: Path) -> None:
    RoundLog(tmp_path / "a").close()
    (tmp_path / "a" / "rounds.sqlite").chmod(0o644)
    with pytest.raises(TrustError, match="chmod 600"):
        RoundLog(tmp_path / "a")
    (tmp_path / "a" / "rounds.sqlite").chmod(0o600)
    RoundLog(tmp_path / "a").close()  # the lock was let go


def test_another_key_does_not_open_it(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "a")
    open_round(log, 1)
    log.close()
    (tmp_path / "a" / "rounds.key").write_bytes(os.urandom(32))
    again = RoundLog(tmp_path / "a")
    with pytest.raises(TrustError, match="restore both"):
        again.sealing_key(1)
    again.close()


def test_a_disk_that_takes_nothing_loses_nothing(log: RoundLog, tmp_path: Path) -> None:
    made, _ = open_round(log, 1)
    with sqlite3.connect(tmp_path / "aggregator" / "rounds.sqlite") as other:
        other.execute("BEGIN IMMEDIATE")
        log._db.execute("PRAGMA busy_timeout = 1")
        with pytest.raises(TransportError, match="the round goes on where it stopped"):
            log.keep(1, "site-1", sealed("site-1", made.digest))
        other.rollback()
    log.keep(1, "site-1", sealed("site-1", made.digest))
    assert list(log.answers(1)) == ["site-1"]


def test_exclusions_are_forgiven_from_the_next_round_on(log: RoundLog) -> None:
    for number in (1, 2, 3):
        finish(log, number, REFUSAL)
    assert list(log.suspended()) == ["site-2"]
    log.readmit("site-2", now_s=1.0)
    for number in (4, 5):
        finish(log, number, REFUSAL)
        assert log.suspended() == {}
    finish(log, 6, REFUSAL)
    assert "rounds 4, 5, 6" in log.suspended()["site-2"]
    assert sorted(log.exclusions()["site-2"]) == [1, 2, 3, 4, 5, 6]
