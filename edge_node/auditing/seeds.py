"""Does a seed bring back noise or batches: in this process, and in another."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from common.errors import PrivacyError
from edge_node.training.noise import SecureRandom
from edge_node.training.private_step import ClippedSum

_CHILD_TIMEOUT_S = 120.0
_CHILD = "from edge_node.auditing.seeds import draw_under_a_seed; print(draw_under_a_seed())"


def draw_under_a_seed() -> str:
    """Noise of one release and one batch, as text, drawn after every usual generator was seeded."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    secret = SecureRandom()
    noise = ClippedSum(16, clip_norm=1.0, noise_multiplier=1.0).release(secret).tolist()
    return f"{noise}|{secret.bernoulli(0.5, 128).tolist()}"


def repeated_in_one_process() -> int:
    """How many of noise and batch come back when this process seeds and draws again."""
    with _seeds_restored():
        return _repeated([draw_under_a_seed() for _ in range(2)])


def repeated_in_another_process() -> int:
    """How many of noise and batch are the same here and in a fresh process; raises PrivacyError where it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run(  # noqa: S603 - this interpreter, a constant text
            [sys.executable, "-c", _CHILD],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=_CHILD_TIMEOUT_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise PrivacyError(f"a process that should draw noise failed: {error}") from error
    with _seeds_restored():
        return _repeated([draw_under_a_seed(), child.stdout])


@contextmanager
def _seeds_restored() -> Iterator[None]:
    """What is drawn inside leaves no seed behind."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _repeated(draws: list[str]) -> int:
    first, second = (text.strip().split("|") for text in draws)
    return sum(a == b for a, b in zip(first, second, strict=True))
