"""An aggregate becomes a version in the hub."""

from __future__ import annotations

from common.plan import RoundPlan
from common.update import Aggregate
from model_hub.hub import Hub
from model_hub.rollout import Stage
from model_hub.version import Lineage, ModelVersion


def publish(aggregate: Aggregate, plan: RoundPlan, hub: Hub, *, balance: bool) -> ModelVersion:
    """Add the aggregate to the plan's adapter, submit it, and start its canary if the gates pass.

    Args:
        balance: publish equal products from factors of equal norm where A was trained.
    """
    start = hub.adapter(plan.adapter_version)
    candidate = start.with_added(start.names(plan.lora_phase), aggregate.delta_D)
    lineage = Lineage(plan.base_digest, plan.digest, aggregate.participants, aggregate.rule, plan.lora_phase)
    version = hub.submit(
        candidate,
        lineage=lineage,
        largest_change=plan.clip_norm,
        published=candidate.balanced() if balance and plan.lora_phase == "A" else None,
    )
    if version.stage is Stage.GATED:
        hub.start_canary(version)
    return version
