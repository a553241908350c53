"""What an audit says: figures, each with the interval it was expected in, and what they do not prove."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number and the closed interval it must lie in; a bound of None is open."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def passed(self) -> bool:
        return (
            math.isfinite(self.value)
            and (self.low is None or self.value >= self.low)
            and (self.high is None or self.value <= self.high)
        )

    def data(self) -> dict[str, Any]:
        value = float(self.value) if math.isfinite(self.value) else None
        return {"name": self.name, "value": value, "low": self.low, "high": self.high, "passed": bool(self.passed)}


@dataclass(frozen=True)
class Check:
    """One question asked of the mechanism.

    Attributes:
        tested: what was done.
        meaning: what a pass means.
        not_proven: what a pass leaves open.
    """

    code: str
    title: str
    tested: str
    meaning: str
    not_proven: str
    figures: tuple[Figure, ...]

    @property
    def passed(self) -> bool:
        """Whether there are figures and all of them hold."""
        return bool(self.figures) and all(figure.passed for figure in self.figures)

    def data(self) -> dict[str, Any]:
        texts = {name: getattr(self, name) for name in ("code", "title", "tested", "meaning", "not_proven")}
        return {**texts, "passed": self.passed, "figures": [figure.data() for figure in self.figures]}


@dataclass(frozen=True)
class Statement:
    """The result of one audit.

    Attributes:
        kind: `privacy` or `inversion`.
        subject: what was audited, for the head of the page.
        demonstration: what an attack found, by case; empty for `privacy`.
    """

    kind: str
    subject: Mapping[str, Any]
    checks: tuple[Check, ...]
    demonstration: tuple[Mapping[str, Any], ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def data(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "passed": self.passed,
            "subject": dict(self.subject),
            "checks": [check.data() for check in self.checks],
            "demonstration": [dict(case) for case in self.demonstration],
        }
