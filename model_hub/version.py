"""A published adapter version and its lineage."""

from __future__ import annotations

from dataclasses import dataclass

from model_hub.rollout import Stage


@dataclass(frozen=True)
class Lineage:
    """Where a version comes from.

    Attributes:
        base_digest: of the base model it belongs to.
        plan_digest: of the round that made it; empty for the initial one and for drills.
        participants: sites whose updates are in it.
        rule: how they were combined.
        phase: LoRA factor that was trained, `A` or `B`.
    """

    base_digest: str
    plan_digest: str = ""
    participants: tuple[str, ...] = ()
    rule: str = ""
    phase: str = ""


@dataclass(frozen=True)
class ModelVersion:
    """One version as the catalog knows it; `reason` says why it is in its state."""

    id: str
    parent: str | None
    digest: str
    lineage: Lineage
    stage: Stage
    reason: str
    created_at_s: float
