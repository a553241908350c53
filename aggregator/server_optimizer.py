"""What a round's combined change is turned into before it is added to the version in use.

Plain averaging adds it as it is, and is the default. FedAvgM (Hsu et al. 2019,
arXiv:1909.06335) and FedAdam (Reddi et al. 2021, arXiv:2003.00295, algorithm 2,
with the bias correction of Flower's) remember earlier changes.

What is remembered belongs to the version it was made with, and is found by the plan
of the round that made it. A round on the stable version begins with that version's
moments: those of a version that was rejected or rolled back are never read again,
and after a restart nothing has to be put right. Each LoRA factor has moments of its
own, moved only in the rounds that train it.

A step is never longer than the plan's clip norm, whatever the moments say: that
bound is what the gates promise for every release.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from common.errors import ConfigError, TransportError
from common.identity import write_private

OPTIMIZERS = ("average", "fedavgm", "fedadam")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ServerOptimizer:
    """Fixed for a run.

    Attributes:
        name: one of OPTIMIZERS.
        learning_rate: of the server; FedAdam wants about the size of one coordinate's change.
        beta_1: decay of the momentum.
        beta_2, tau: FedAdam's decay of the squares, and what it adds to their root.
    Raises:
        ConfigError: a number is out of its range.
    """

    name: str = "average"
    learning_rate: float = 1.0
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(f"unknown server optimizer {self.name!r}; known: {', '.join(OPTIMIZERS)}")
        if self.name == "average" and self.learning_rate != 1.0:
            raise ConfigError("plain averaging has a learning rate of 1; take fedavgm with beta_1 = 0 for another")
        if not 0 < self.learning_rate < np.inf or not 0 < self.tau < np.inf:
            raise ConfigError("the server's learning_rate and tau must be positive")
        if not (0 <= self.beta_1 < 1 and 0 <= self.beta_2 < 1):
            raise ConfigError("the server's beta_1 and beta_2 must be at least 0 and below 1")

    @property
    def remembers(self) -> bool:
        return self.name != "average"


PLAIN_AVERAGE = ServerOptimizer()


@dataclass(frozen=True, eq=False)
class Moments:
    """What one factor's steps so far have left behind.

    Attributes:
        steps: how many.
        first_D: decayed sum (FedAvgM) or mean (FedAdam) of the changes, float32.
        second_D: decayed mean of their squares; empty but for FedAdam.
    """

    steps: int
    first_D: np.ndarray
    second_D: np.ndarray

    @staticmethod
    def none(optimizer: ServerOptimizer, parameters: int) -> Moments:
        squares = parameters if optimizer.name == "fedadam" else 0
        return Moments(0, np.zeros(parameters, np.float32), np.zeros(squares, np.float32))


def step(
    optimizer: ServerOptimizer, moments: Moments, delta_D: np.ndarray, *, longest: float
) -> tuple[np.ndarray, Moments]:
    """The change to add and the moments after it; both float32 [D].

    Args:
        delta_D: the round's combined change.
        longest: L2 bound of the step; a longer one is shortened, the moments are not.
    """
    rate, beta_1, beta_2 = (np.float32(x) for x in (optimizer.learning_rate, optimizer.beta_1, optimizer.beta_2))
    first_D, second_D = moments.first_D, moments.second_D
    if optimizer.name == "average":
        return delta_D.astype(np.float32), moments
    if optimizer.name == "fedavgm":
        first_D = beta_1 * first_D + delta_D
        step_D = rate * first_D
    else:
        first_D = beta_1 * first_D + (1 - beta_1) * delta_D
        second_D = beta_2 * second_D + (1 - beta_2) * delta_D**2
        power = moments.steps + 2  # Flower counts rounds from 1 and adds one
        correction = np.sqrt(1 - optimizer.beta_2**power) / (1 - optimizer.beta_1**power)
        step_D = rate * np.float32(correction) * first_D / (np.sqrt(second_D) + np.float32(optimizer.tau))
    norm = float(np.linalg.norm(step_D.astype(np.float64)))
    if norm > longest:
        step_D = step_D * np.float32(longest / norm)
    return step_D.astype(np.float32), Moments(moments.steps + 1, first_D, second_D)


class MomentsStore:
    """Moments of each factor by the plan of the round that made the version they belong to; one file per plan."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, plan_digest: str, optimizer: ServerOptimizer) -> dict[str, Moments]:
        """By LoRA factor; none where the version was made otherwise, or by an optimizer with other settings.

        Raises:
            TransportError: the file cannot be read.
        """
        file = self._file(plan_digest)
        if not optimizer.remembers or not plan_digest or not file.exists():
            return {}
        try:
            with safe_open(file, framework="numpy") as opened:
                kept = json.loads(opened.metadata()["moments"])
                if kept["optimizer"] != dataclasses.asdict(optimizer) or kept["plan"] != plan_digest:
                    return {}
                return {
                    factor: Moments(
                        int(steps), opened.get_tensor(f"{factor}.first"), opened.get_tensor(f"{factor}.second")
                    )
                    for factor, steps in kept["steps"].items()
                }
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise TransportError(
                f"the server optimizer's moments {file} cannot be read; delete the file to begin with none"
            ) from error

    def save(self, plan_digest: str, optimizer: ServerOptimizer, moments: Mapping[str, Moments]) -> None:
        """Store moments whole; raises TransportError where the disk does not take them."""
        if not optimizer.remembers:
            return
        kept: dict[str, Any] = {
            "optimizer": dataclasses.asdict(optimizer),
            "plan": plan_digest,
            "steps": {factor: one.steps for factor, one in moments.items()},
        }
        tensors = {}
        for factor, one in moments.items():
            tensors[f"{factor}.first"], tensors[f"{factor}.second"] = one.first_D, one.second_D
        file = self._file(plan_digest)
        partial = file.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.unlink(missing_ok=True)
            write_private(partial, save(tensors, metadata={"moments": json.dumps(kept)}))
            partial.replace(file)
        except OSError as error:
            raise TransportError(f"the server optimizer's moments were not stored: {error}; free the disk") from error

    def forget_all_but(self, plan_digests: Set[str]) -> None:
        """Delete the moments of all other versions."""
        for file in self._folder.glob("*.safetensors"):
            if file.stem not in plan_digests:
                file.unlink(missing_ok=True)

    def _file(self, plan_digest: str) -> Path:
        if plan_digest and not _DIGEST.fullmatch(plan_digest):
            raise ValueError("a plan digest is 64 hexadecimal digits")
        return self._folder / f"{plan_digest}.safetensors"
