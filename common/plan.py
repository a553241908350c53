"""The signed plan of one round: everything a site trains against.

A plan is public. A site trains only against a plan whose signature it has
verified, and only as far as its own policy allows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from common.adapter import PHASES
from common.errors import TrustError
from common.identity import SigningKey, canonical, sha256_hex, verify

LABEL = "round-plan"
MAXIMUM_STEPS = 10_000
MAXIMUM_ROUNDS = 10_000

_HEX_256 = re.compile(r"[0-9a-f]{64}")


def _set_positive(record: object, name: str) -> None:
    """Keep a field as a float, so that a plan has one encoding; ValueError unless positive and finite."""
    value = float(getattr(record, name))
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} = {value} must be positive")
    object.__setattr__(record, name, value)


@dataclass(frozen=True)
class Training:
    """Public hyper-parameters of private training; the noise is each site's own choice.

    Attributes:
        objective: name in `edge_node.training.OBJECTIVES`.
        optimizer: name in `edge_node.training.trainer.OPTIMIZERS`.
        learning_rate: of the optimizer, on the noisy mean gradient.
        steps: private steps in this round.
        sampling_rate: Poisson rate q of one unit in one step.
        expected_batch: q times the nominal number of units; a constant, never a count.
        unit_clip_norm: L2 clip C of one unit's gradient.
        hyperparameters: public constants of the objective by name; those not named keep its defaults.
        lora_dropout: on the adapter's inputs while training.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    objective: str
    optimizer: str
    learning_rate: float
    steps: int
    sampling_rate: float
    expected_batch: float
    unit_clip_norm: float
    hyperparameters: dict[str, float]
    lora_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "sampling_rate", "expected_batch", "unit_clip_norm"):
            _set_positive(self, name)
        if not 1e-6 <= self.unit_clip_norm <= 1e6:
            raise ValueError(f"unit_clip_norm = {self.unit_clip_norm} must be within 1e-6 and 1e6")
        object.__setattr__(self, "lora_dropout", float(self.lora_dropout))
        object.__setattr__(self, "hyperparameters", {n: float(v) for n, v in sorted(self.hyperparameters.items())})
        if not all(map(math.isfinite, self.hyperparameters.values())):
            raise ValueError("every hyperparameter must be finite")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout = {self.lora_dropout} must be within [0, 1)")
        if not 1 <= self.steps <= MAXIMUM_STEPS:
            raise ValueError(f"steps = {self.steps} must be within 1..{MAXIMUM_STEPS}")
        if self.sampling_rate > 1:
            raise ValueError(f"sampling_rate = {self.sampling_rate} must be at most 1")


@dataclass(frozen=True)
class RoundPlan:
    """One round of one federation.

    Attributes:
        round: counts from 1; `planned_rounds` is what a site solves its noise for.
        base_digest: of the base model folder every site must have.
        adapter_version, adapter_digest: the version updates are relative to.
        lora_phase: `A` or `B`, the factor trained and averaged this round.
        clip_norm: L2 bound of one site's whole update.
        weights: contract weight in {1, 2, 4} by site name.
        roster_digest: of all site names and public keys.
        sealing_key: hex of the aggregator's X25519 key, fresh for this round.
        deadline_s: seconds since the epoch after which no update counts.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    federation: str
    round: int
    planned_rounds: int
    base_digest: str
    adapter_version: str
    adapter_digest: str
    training: Training
    lora_phase: str
    clip_norm: float
    weights: dict[str, int]
    roster_digest: str
    sealing_key: str
    deadline_s: float

    def __post_init__(self) -> None:
        if self.lora_phase not in PHASES:
            raise ValueError(f"lora_phase = {self.lora_phase!r} must be one of {PHASES}")
        for name in ("clip_norm", "deadline_s"):
            _set_positive(self, name)
        for name in ("base_digest", "adapter_digest", "roster_digest", "sealing_key"):
            if not _HEX_256.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} must be 64 hexadecimal digits")
        if not 1 <= self.round <= self.planned_rounds <= MAXIMUM_ROUNDS:
            raise ValueError(f"round {self.round} of {self.planned_rounds} is not within 1..{MAXIMUM_ROUNDS}")
        if not set(self.weights.values()) <= {1, 2, 4}:
            raise ValueError("weights must be 1, 2 or 4")

    @cached_property
    def payload(self) -> bytes:
        return canonical({**_shallow(self), "training": _shallow(self.training)})

    @cached_property
    def digest(self) -> str:
        return sha256_hex(self.payload)


def _shallow(record: RoundPlan | Training) -> dict[str, Any]:
    """Its fields as they are; `dataclasses.asdict` would copy every weight of every site."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


_PLAN = TypeAdapter(RoundPlan)


def sign_plan(plan: RoundPlan, key: SigningKey) -> bytes:
    return key.sign(LABEL, plan.payload)


def verify_plan(payload: bytes, signature: bytes, *, aggregator: bytes) -> RoundPlan:
    """Check the signature, then read the plan.

    Raises:
        TrustError: not signed by `aggregator`, or not a plan.
    """
    verify(aggregator, LABEL, payload, signature)
    return parse_plan(payload)


def parse_plan(payload: bytes) -> RoundPlan:
    """Read a plan whose origin is known; raises TrustError where it is not a plan."""
    try:
        return _PLAN.validate_json(payload, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise TrustError(f"the round plan is malformed at {first['loc']}: {first['type']}") from error
