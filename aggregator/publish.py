"""An aggregate becomes a version in the hub."""

from __future__ import annotations

from aggregator.server_optimizer import Moments, MomentsStore, ServerOptimizer, step
from common.plan import RoundPlan
from common.update import Aggregate
from model_hub.hub import Hub
from model_hub.rollout import Stage
from model_hub.version import Lineage, ModelVersion

_MAY_BE_BUILT_ON = (Stage.CANDIDATE, Stage.GATED, Stage.CANARY, Stage.STABLE)


def publish(
    aggregate: Aggregate,
    plan: RoundPlan,
    hub: Hub,
    *,
    balance: bool,
    optimizer: ServerOptimizer,
    moments: MomentsStore,
) -> ModelVersion:
    """Add what the server optimizer makes of the aggregate to the plan's adapter, submit it, start its canary.

    The canary starts if the gates pass. A process killed on the way does the same again.

    Args:
        balance: publish equal products from factors of equal norm where A was trained.
        moments: of the versions published so far.
    """
    start = hub.adapter(plan.adapter_version)
    before = moments.load(hub.version(plan.adapter_version).lineage.plan_digest, optimizer)
    last = before.get(plan.lora_phase)
    if last is None or last.first_D.shape != aggregate.delta_D.shape:
        last = Moments.none(optimizer, aggregate.delta_D.size)
    step_D, after = step(optimizer, last, aggregate.delta_D, longest=plan.clip_norm)
    moments.save(plan.digest, optimizer, {**before, plan.lora_phase: after})
    candidate = start.with_added(start.names(plan.lora_phase), step_D)
    lineage = Lineage(plan.base_digest, plan.digest, aggregate.participants, aggregate.rule, plan.lora_phase)
    version = hub.submit(
        candidate,
        lineage=lineage,
        largest_change=plan.clip_norm,
        published=candidate.balanced() if balance and plan.lora_phase == "A" else None,
    )
    moments.forget_all_but({v.lineage.plan_digest for v in hub.catalog.versions() if v.stage in _MAY_BE_BUILT_ON})
    if version.stage is Stage.GATED:
        hub.start_canary(version)
    return version
