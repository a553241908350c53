"""Making the signed plan of a round."""

from __future__ import annotations

from aggregator.federation import Federation
from common.identity import SealingKey
from common.plan import RoundPlan
from model_hub.version import ModelVersion


def phase_of(round_number: int) -> str:
    """LoRA factors are trained in turn; B first, because A has no gradient while B is zero."""
    return "B" if round_number % 2 == 1 else "A"


def make_plan(
    federation: Federation, stable: ModelVersion, *, number: int, sealing_key: SealingKey, now_s: float
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
        lora_phase=phase_of(number),
        clip_norm=federation.clip_norm,
        weights=dict(federation.weights),
        roster_digest=federation.roster_digest,
        sealing_key=sealing_key.public.hex(),
        deadline_s=now_s + federation.collect_timeout_s,
    )
