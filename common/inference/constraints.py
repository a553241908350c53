"""Constraints on what is generated: which tokens may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class InvalidSchema(ValueError):
    """A schema or tool description that cannot be followed; the message says why."""


class Constraint(Protocol):
    """The state of one answer that must follow a form."""

    def mask(self) -> np.ndarray:
        """Which tokens may come next: bool [V]."""

    def accept(self, token_id: int) -> None:
        """Advance by the token that was drawn."""
