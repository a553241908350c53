"""Making the signed plan of a round, and what becomes of updates for earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.federation import Federation
from common.adapter import Adapter
from common.identity import SealingKey
from common.plan import RoundPlan
from model_hub.version import ModelVersion


def phase_of(stable: ModelVersion, adapter: Adapter, *, mode: str) -> str:
    """The factor to train: in `alternate` the other one than made the stable version; B while B is zero.

    It follows the versions and not the number of the round, so that a round without a result does not break the
    alternation. While B is zero A has no gradient. In `ffa` it is always B.
    """
    if mode == "ffa" or not adapter.flatten(adapter.names("B")).any():
        return "B"
    return "A" if stable.lineage.phase == "B" else "B"


def make_plan(
    federation: Federation,
    stable: ModelVersion,
    adapter: Adapter,
    *,
    number: int,
    sealing_key: SealingKey,
    now_s: float,
) -> RoundPlan:
    """The plan of round `number`, relative to the stable version."""
    return RoundPlan(
        federation=federation.name,
        round=number,
        planned_rounds=federation.planned_rounds,
        base_digest=stable.lineage.base_digest,
        adapter_version=stable.id,
        adapter_digest=stable.digest,
        training=federation.training,
        lora_phase=phase_of(stable, adapter, mode=federation.lora_mode),
        clip_norm=federation.clip_norm,
        weights=dict(federation.weights),
        roster_digest=federation.roster_digest,
        sealing_key=sealing_key.public.hex(),
        deadline_s=now_s + federation.collect_timeout_s,
    )


def lag(adapter_version: str, *, stable: ModelVersion, versions: Sequence[ModelVersion]) -> int | None:
    """Versions between the one an update is relative to and the stable one; None where the latter is not built on it.

    Public: everybody knows the versions.
    """
    parent_of = {version.id: version.parent for version in versions}
    ancestor: str | None = stable.id
    behind = 0
    while ancestor is not None and ancestor != adapter_version:
        ancestor, behind = parent_of.get(ancestor), behind + 1
    return None if ancestor is None else behind


def damping(lag: int) -> float:
    """What an update `lag` versions behind counts: (1 + lag)^-1/2; Xie et al. 2019, arXiv:1903.03934, polynomial."""
    return (1 + lag) ** -0.5
