"""A site killed at every step of its rounds: nothing is spent twice, understated or half sent."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.accounting import PrivateSteps, epsilon
from common.errors import PrivacyError
from common.identity import SigningKey, sha256_hex
from common.update import PrivateUpdate
from edge_node.training import finished_updates, ledger
from edge_node.training.finished_updates import FinishedUpdates
from edge_node.training.ledger import Ledger
from edge_node.training.noise import SecureRandom
from edge_node.training.private_step import ClippedSum

DELTA = 1e-5
EVENT = PrivateSteps(20.0, 1.0, 3)
DIMENSION = 64
PURPOSE = "training"


@dataclass
class SmallSite:
    """Rounds in the order of a real site, on a small vector; every noisy sum is noted beside the ledger."""

    folder: Path
    key: SigningKey = field(default_factory=lambda: SigningKey(Ed25519PrivateKey.generate()))

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.updates = FinishedUpdates(self.folder / "updates")

    @staticmethod
    def plan(number: int) -> str:
        return sha256_hex(f"plan {number}".encode())

    def file(self, number: int) -> Path:
        return self.folder / "updates" / f"{self.plan(number)}.safetensors"

    def open_ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.sqlite", self.key)

    def round(self, number: int, moment: Callable[[str], None] = lambda name: None) -> bytes:
        """Train round `number`, or hand over what is stored of it."""
        opened = self.open_ledger()
        try:
            opened.open_budget({PURPOSE: EVENT}, now_s=time.time(), unit="trajectory")
            update = self.updates.get(self.plan(number)) or self._train(number, opened, moment)
            opened.commit(update.ledger_entry, sha256_hex(update.file_bytes), now_s=time.time())
            moment("committed")
            return update.file_bytes
        finally:
            opened.close()

    def _train(self, number: int, opened: Ledger, moment: Callable[[str], None]) -> PrivateUpdate:
        moment("before the reservation")
        entry = opened.reserve(
            PURPOSE, str(number), self.plan(number), epsilon_total=50.0, delta=DELTA, now_s=time.time()
        )
        moment("reserved")
        value_D = torch.zeros(DIMENSION, dtype=torch.float64)
        for step in range(EVENT.steps):
            total = ClippedSum(DIMENSION, clip_norm=1.0, noise_multiplier=EVENT.noise_multiplier)
            total.add(torch.full((4, DIMENSION), 0.1))
            value_D += total.release(SecureRandom())
            self._note(number, step)
            moment(f"step {step}")
        delta_D = value_D.numpy().astype(np.float32)
        update = PrivateUpdate(self.plan(number), {"w": (DIMENSION,)}, delta_D, entry)
        self.updates.put(update, data_until_s=float(number))
        moment("stored")
        return update

    def _note(self, number: int, step: int) -> None:
        with (self.folder / "sums").open("a") as file:
            file.write(f"{number}/{step}\n")

    def sums(self) -> Counter[str]:
        """How often the noisy sum of each `round/step` was made."""
        notes = self.folder / "sums"
        return Counter(notes.read_text().split()) if notes.exists() else Counter()


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


Arm = Callable[[pytest.MonkeyPatch], None]


def _in_transaction(kind: str) -> Arm:
    def arm(patch: pytest.MonkeyPatch) -> None:
        append = Ledger._append

        def append_and_die(self: Ledger, row: Any) -> str:
            digest = append(self, row)
            return die() if row["kind"] == kind else digest

        patch.setattr(Ledger, "_append", append_and_die)

    return arm


def _at_head(kind: str, *, half: bool) -> Arm:
    def arm(patch: pytest.MonkeyPatch) -> None:
        append, replace = Ledger._append, ledger.replace_file
        last = [""]

        def note(self: Ledger, row: Any) -> str:
            last[0] = row["kind"]
            return append(self, row)

        def replace_or_die(path: Path, data: bytes) -> None:
            if last[0] != kind:
                return replace(path, data)
            if half:
                path.with_name(f".{path.name}.partial").write_bytes(data[: len(data) // 2])
            die()

        patch.setattr(Ledger, "_append", note)
        patch.setattr(ledger, "replace_file", replace_or_die)

    return arm


def _half_an_update(patch: pytest.MonkeyPatch) -> None:
    def write_half(path: Path, data: bytes) -> None:
        path.with_name(f".{path.name}.{os.getpid()}.partial").write_bytes(data[: len(data) // 2])
        path.write_bytes(data[: len(data) // 2])
        die()

    patch.setattr(finished_updates, "write_private", write_half)


def _before_renaming(patch: pytest.MonkeyPatch) -> None:
    replace = pathlib.Path.replace

    def replace_or_die(self: Path, target: Path) -> Path:
        return die() if target.suffix == ".safetensors" else replace(self, target)

    patch.setattr(pathlib.Path, "replace", replace_or_die)


ARMED: dict[str, Arm] = {
    "in the reservation's transaction": _in_transaction("reserve"),
    "reserved, head not written": _at_head("reserve", half=False),
    "reserved, head half written": _at_head("reserve", half=True),
    "update half written": _half_an_update,
    "update written, not in place": _before_renaming,
    "in the commit's transaction": _in_transaction("commit"),
    "committed, head not written": _at_head("commit", half=False),
    "committed, head half written": _at_head("commit", half=True),
}
MOMENTS = ("before the reservation", "reserved", "step 0", "step 1", "step 2", "stored", "committed")
NOTHING_CHARGED = ("before the reservation", "in the reservation's transaction")
STORED = (
    "stored",
    "in the commit's transaction",
    "committed, head not written",
    "committed, head half written",
    "committed",
)


def forked(work: Callable[[], object]) -> int:
    """Start `work` in a copy of this process; its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def was_killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def killed_at(site: SmallSite, number: int, point: str) -> None:
    def work() -> None:
        patch = pytest.MonkeyPatch()
        if point in ARMED:
            ARMED[point](patch)
        site.round(number, lambda name: die() if name == point else None)

    assert was_killed(forked(work)), f"{point} was not reached"


def check(site: SmallSite, number: int) -> tuple[bool, bool]:
    """What holds after any kill; whether the round is charged and whether its update is stored."""
    opened = site.open_ledger()  # verifies chain, signatures and head
    try:
        charged = {charge.round for charge in opened.charges()}
        released = {note.split("/")[0] for note in site.sums()}
        stored = {update for update in range(1, number + 1) if site.updates.get(site.plan(update)) is not None}
        assert released | {str(update) for update in stored} <= charged
        assert opened.epsilon_spent(DELTA) >= epsilon([EVENT] * len(charged | released), delta=DELTA)
        assert site.updates.ledger_entries() <= opened.entries()
        opened.check_witness(opened.signed_head())
        return str(number) in charged, number in stored
    finally:
        opened.close()


def recover(site: SmallSite, number: int) -> None:
    """Ask again, twice, for a round that was interrupted; then for the next one."""
    charged, stored = check(site, number)
    before = site.file(number).read_bytes() if stored else b""
    noise = site.sums()
    if charged and not stored:
        for _ in range(2):
            with pytest.raises(PrivacyError, match="charged before"):
                site.round(number)
        assert site.sums() == noise
        assert not site.file(number).exists()
    else:
        sent = [site.round(number) for _ in range(2)]
        assert sent[0] == sent[1]
        if stored:
            assert site.file(number).read_bytes() == before
            assert site.sums() == noise
        opened = site.open_ledger()
        found = opened.reservation(PURPOSE, str(number))
        opened.close()
        assert found is not None and found.outcome == sha256_hex(sent[0])
    site.round(number + 1)
    assert max(site.sums().values()) == 1  # no step of any round was ever drawn twice


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a forked child has no other


REPEATS = 3


def test_the_ledger_survives_kills_at_every_step(tmp_path: Path) -> None:
    kills = 0
    for repeat in range(REPEATS):
        site = SmallSite(tmp_path / str(repeat))
        for number, point in enumerate((*MOMENTS, *ARMED)):
            killed_at(site, 2 * number + 1, point)
            kills += 1
            charged, stored = check(site, 2 * number + 1)
            assert charged == (point not in NOTHING_CHARGED), point
            assert stored == (point in STORED), point
            recover(site, 2 * number + 1)
    assert kills == REPEATS * 15


def test_the_ledger_survives_kills_at_any_time(tmp_path: Path) -> None:
    site = SmallSite(tmp_path)
    site.round(1)
    number, delays = 2, random.Random()
    for _ in range(15):

        def rounds(first: int = number) -> None:
            for following in range(first, first + 10_000):
                site.round(following)

        child = forked(rounds)
        time.sleep(delays.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        assert was_killed(child)
        begun = [int(note.split("/")[0]) for note in site.sums()]
        opened = site.open_ledger()
        begun += [int(charge.round) for charge in opened.charges()]
        opened.close()
        last = max(begun)
        recover(site, last)
        number = last + 2
    assert number > 15
