"""The life of a version as a table of states.

`candidate → gated → canary → stable → retired`, or `rejected` by a gate, or
`rolled_back` by evidence. Rolling back from stable publishes a newer pointer to
an older, retired version, which becomes stable again.
"""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """Where a version is in its life."""

    CANDIDATE = "candidate"
    GATED = "gated"
    CANARY = "canary"
    STABLE = "stable"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


NEXT: dict[Stage, frozenset[Stage]] = {
    Stage.CANDIDATE: frozenset({Stage.GATED, Stage.REJECTED}),
    Stage.GATED: frozenset({Stage.CANARY, Stage.REJECTED}),
    Stage.CANARY: frozenset({Stage.STABLE, Stage.ROLLED_BACK}),
    Stage.STABLE: frozenset({Stage.RETIRED, Stage.ROLLED_BACK}),
    Stage.RETIRED: frozenset({Stage.STABLE}),
    Stage.REJECTED: frozenset(),
    Stage.ROLLED_BACK: frozenset(),
}


def advance(stage: Stage, to: Stage) -> Stage:
    """The next stage; raises ValueError where the table has no such arrow."""
    if to not in NEXT[stage]:
        allowed = ", ".join(sorted(NEXT[stage])) or "nothing: it is final"
        raise ValueError(f"a version cannot go from {stage} to {to}; from there it can go to {allowed}")
    return to
