"""Finished private updates on disk, by plan: written once, handed over as often as asked.

Sending the same bytes again costs no privacy; making them again would.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from common.errors import TransportError
from common.identity import write_private
from common.update import PrivateUpdate

_DIGEST = re.compile(r"[0-9a-f]{64}")


class FinishedUpdates:
    """One file per plan, readable by the owner only."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder

    def get(self, plan_digest: str) -> PrivateUpdate | None:
        file = self._file(plan_digest)
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="numpy") as opened:
                tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
                entry = opened.metadata()["ledger_entry"]
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise TransportError(f"the finished update {file} cannot be read; this round is lost") from error
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return PrivateUpdate(plan_digest, shapes, np.concatenate([t.reshape(-1) for t in tensors.values()]), entry)

    def put(self, update: PrivateUpdate, *, data_until_s: float) -> None:
        """Store an update whole; raises TransportError where the disk does not take it."""
        file = self._file(update.plan_digest)
        partial = file.with_suffix(".partial")
        metadata = {"ledger_entry": update.ledger_entry, "data_until_s": repr(data_until_s)}
        try:
            partial.unlink(missing_ok=True)
            write_private(partial, save(update.tensors, metadata=metadata))
            partial.replace(file)
        except OSError as error:
            raise TransportError(f"the finished update could not be stored: {error}") from error

    def ledger_entries(self) -> set[str]:
        """The ledger entries that readable updates name."""
        entries = set()
        for file in self._folder.glob("*.safetensors"):
            try:
                with safe_open(file, framework="numpy") as opened:
                    entries.add(opened.metadata()["ledger_entry"])
            except (SafetensorError, OSError, KeyError, TypeError):
                continue
        return entries

    def data_until_s(self) -> float:
        """Collection time up to which records are in some finished update; 0 for none."""
        times = [0.0]
        for file in self._folder.glob("*.safetensors"):
            try:
                with safe_open(file, framework="numpy") as opened:
                    times.append(float(opened.metadata()["data_until_s"]))
            except (SafetensorError, OSError, KeyError, TypeError, ValueError):
                continue  # its data may be used once more; that is accounted like any use
        return max(times)

    def _file(self, plan_digest: str) -> Path:
        if not _DIGEST.fullmatch(plan_digest):
            raise ValueError("a plan digest is 64 hexadecimal digits")
        return self._folder / f"{plan_digest}.safetensors"
