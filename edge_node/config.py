"""Settings of one edge node (`edge.toml`). The site's law is elsewhere: `policy.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from common.adapter import LoraShape
from common.config import Section
from common.inference.model_folder import EMBEDDED, TARGET_MODULES

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class EngineSettings(Section):
    """The inference engine; `provider` must be effective or start-up fails."""

    provider: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    slots: Annotated[int, Field(ge=1, le=256)] = 8
    context_tokens: Annotated[int, Field(ge=16)] = 2048
    threads: Annotated[int, Field(ge=1)] = 2


class LoraSettings(Section):
    """Shape of the federation's adapters."""

    rank: Annotated[int, Field(ge=1, le=256)] = 8
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16.0

    @property
    def shape(self) -> LoraShape:
        return LoraShape(self.rank, self.alpha, TARGET_MODULES)


class TrainingSettings(Section):
    """How this machine trains; nothing here but `min_samples` changes the privacy mechanism.

    Attributes:
        min_samples: units a site must have to take part, by a noisy count; 0 to take part always and not count.
        physical_batch: rows per forward pass; `auto` takes what half of the free memory holds.
        engine: `flat`, or `one-unit` for half the memory.
        precision: of the frozen base; adapters and gradients are float32.
        gradient_checkpointing: recompute activations; less memory, about a third more time.
        iteration_limit_s: longest expected private step; a longer one is refused before anything is charged.
    """

    min_samples: Annotated[int, Field(ge=0)] = 100
    physical_batch: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    engine: Literal["flat", "one-unit"] = "flat"
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    gradient_checkpointing: bool = False
    iteration_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0

    @model_validator(mode="after")
    def _units_apart(self) -> TrainingSettings:
        if self.precision != "float32" and self.engine != "one-unit":
            raise ValueError(
                f"precision {self.precision} needs engine one-unit: in a shared pass its rounding lets one unit "
                "move the gradients of others by more than the clip allows"
            )
        return self


class RewardSettings(Section):
    """Rewards that agents post: `default` where one names none; all are clipped to `min_value` … `max_value`."""

    default: FiniteFloat = 0.0
    max_value: FiniteFloat = 5.0
    min_value: FiniteFloat = -2.0

    @model_validator(mode="after")
    def _in_order(self) -> RewardSettings:
        if not self.min_value <= self.default <= self.max_value:
            raise ValueError("rewards.default must be within min_value and max_value")
        return self


class EdgeConfig(Section):
    """One edge node.

    Attributes:
        federation: whose plans this site follows.
        name: the site's name in the roster.
        data_dir: keys, trajectories, ledger and finished updates; made on first start.
        policy: the site's own law, `policy.toml`.
        hub: folder of the hub's repository.
        hub_key, aggregator_key: hex Ed25519 public keys this site trusts.
        host, port: where the HTTP API listens; loopback unless you say otherwise.
        selection: which answered requests become training data: a built-in strategy, or `package.module:Class`.
        selection_rate: share of answered requests that `sampling-rate` selects.
        selection_wait_s: how long an answer waits in memory for a mark or feedback that decides about it.
    """

    federation: str
    name: str
    data_dir: Path
    policy: Path
    hub: Path
    hub_key: str
    aggregator_key: str
    model: Path = EMBEDDED
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8010
    engine: EngineSettings = EngineSettings()
    lora: LoraSettings = LoraSettings()
    selection: str = "sampling-rate"
    selection_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    selection_wait_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    rewards: RewardSettings = RewardSettings()
    training: TrainingSettings = TrainingSettings()

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("a site name has lower-case letters, digits and hyphens, at most 63")
        return name

    @field_validator("hub_key", "aggregator_key")
    @classmethod
    def _key(cls, key: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise ValueError("a public key is 64 hexadecimal digits")
        return key
