"""Checkpoints of a round that is being trained, so that a killed process can go on.

A checkpoint holds what noisy steps have made: the trainable parameters and the
optimizer's state. Beside it lies the round's key, from which sampling and noise are
drawn: a round that goes on, from whichever checkpoint or from its beginning, repeats
the draws it had instead of making new ones. So nobody can try a round until its
outcome pleases, and one charge pays for it however often it is interrupted. When the
update is finished, key and checkpoints are deleted; the round is never trained again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from common.errors import ConfigError, TransportError, TrustError
from common.identity import load_or_create_secret, read_private, write_private

EVERY_STEPS = 100

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE, _KEY, _WINDOW = "step-{:06d}.safetensors", "round.key", "round.window"


@dataclass(frozen=True)
class TrainingRecord:
    """Everything that fixes a training run beside its data and its noise.

    Attributes:
        plan: all fields of the round's plan.
        ledger_entry: of the reservation that pays for it.
        noise_multiplier: σ; 0 for runs without privacy.
        unit: what one unit is.
        data_after_s, data_until_s: collection times of the records it may use.
        libraries: version by name.
    """

    plan: Mapping[str, Any]
    plan_digest: str
    ledger_entry: str
    noise_multiplier: float
    unit: str
    data_after_s: float
    data_until_s: float
    precision: str
    libraries: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """State after `step` private steps."""

    step: int
    record: TrainingRecord
    tensors: Mapping[str, np.ndarray] = field(repr=False)


class Checkpoints:
    """One folder per plan, one file per checkpoint, readable by the owner only."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder

    def key(self, plan_digest: str) -> bytes:
        """The secret that this round's sampling and noise come from; on disk before this returns.

        Raises:
            TrustError: the file was opened to others.
            TransportError: the disk does not take it.
        """
        folder = self._of(plan_digest)
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
            return load_or_create_secret(folder / _KEY)
        except OSError as error:
            raise TransportError(f"the round's key could not be stored: {error}") from error

    def window(self, plan_digest: str, opened_s: tuple[float, float]) -> tuple[float, float]:
        """Collection times this round looks at: those it was begun with, `opened_s` where it begins now.

        Raises:
            TrustError: the file was opened to others, or is damaged.
            TransportError: the disk does not take it.
        """
        file = self._of(plan_digest) / _WINDOW
        try:
            if not file.exists():
                write_private(file, json.dumps(opened_s).encode())
            after_s, until_s = map(float, json.loads(read_private(file)))
        except OSError as error:
            raise TransportError(f"the round's window could not be stored: {error}") from error
        except (ValueError, TypeError) as error:
            raise TrustError(f"{file} is damaged; delete its folder, and the round is lost") from error
        return after_s, until_s

    def has_key(self, plan_digest: str) -> bool:
        """Whether this round was begun here and can go on."""
        return (self._of(plan_digest) / _KEY).exists()

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint whole; raises TransportError where the disk does not take it."""
        folder = self._of(checkpoint.record.plan_digest)
        metadata = {"step": str(checkpoint.step), "record": json.dumps(asdict(checkpoint.record), sort_keys=True)}
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
            partial = folder / f"partial-{checkpoint.step}"
            partial.unlink(missing_ok=True)
            write_private(partial, save(dict(checkpoint.tensors), metadata=metadata))
            partial.replace(folder / _FILE.format(checkpoint.step))
        except OSError as error:
            raise TransportError(f"the checkpoint of step {checkpoint.step} could not be stored: {error}") from error

    def steps(self, plan_digest: str) -> list[int]:
        """Steps at which this plan has a checkpoint, in order."""
        found = self._of(plan_digest).glob("step-*.safetensors")
        return sorted(int(file.stem.removeprefix("step-")) for file in found)

    def latest(self, plan_digest: str, *, ledger_entry: str) -> Checkpoint | None:
        """The newest readable checkpoint of a plan under the reservation that pays for it."""
        for step in reversed(self.steps(plan_digest)):
            checkpoint = self.read(plan_digest, step)
            if checkpoint is not None and checkpoint.record.ledger_entry == ledger_entry:
                return checkpoint
        return None

    def rewind(self, plan_digest: str, *, step: int) -> None:
        """Delete the checkpoints after `step`, so that training goes on from there.

        Raises:
            ConfigError: there is none at this step.
        """
        steps = self.steps(plan_digest)
        if step not in steps:
            raise ConfigError(f"there is no checkpoint at step {step}; there are {steps or 'none'}")
        for later in (s for s in steps if s > step):
            (self._of(plan_digest) / _FILE.format(later)).unlink(missing_ok=True)

    def plans(self) -> list[str]:
        """Digests of the rounds that were begun and are not finished."""
        return sorted(folder.name for folder in self._folder.iterdir() if _DIGEST.fullmatch(folder.name))

    def remove(self, plan_digest: str) -> None:
        """Forget a plan's key and checkpoints: its update is finished."""
        shutil.rmtree(self._of(plan_digest), ignore_errors=True)

    def read(self, plan_digest: str, step: int) -> Checkpoint | None:
        """One checkpoint, or None where its file is damaged."""
        try:
            with safe_open(self._of(plan_digest) / _FILE.format(step), framework="numpy") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
                record = TrainingRecord(**json.loads(opened.metadata()["record"]))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return None  # an earlier one will do
        return Checkpoint(step, record, tensors)

    def _of(self, plan_digest: str) -> Path:
        if not _DIGEST.fullmatch(plan_digest):
            raise ValueError("a plan digest is 64 hexadecimal digits")
        return self._folder / plan_digest
