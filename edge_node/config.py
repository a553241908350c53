"""Settings of one edge node (`edge.toml`). The site's law is elsewhere: `policy.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, field_validator, model_validator

from common.adapter import LoraShape
from common.config import Section
from common.inference.model_folder import EMBEDDED, TARGET_MODULES
from edge_node.agent.settings import AgentSettings

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_COMMIT_WAIT_S = 600.0


class UpstreamSettings(Section):
    """A model server of the site's own behind this node; see docs/upstream.md.

    Attributes:
        base_url: of its OpenAI API, ending in /v1.
        model: its name of the base model, the one this node trains (`model`).
        key_file: its API key, in a file that only the owner can read.
        kind: `vllm` also gives token ids and loads adapters; `openai` serves the base model only.
        logprobs: what the server's log-probabilities are of: `raw`, the model's own (vLLM's default); `processed`, what
            tokens are drawn from (vLLM with `--logprobs-mode processed_logprobs`); `none`, not to be recorded.
        adapter_folder: where adapters are written for the server; default: a folder in `data_dir`.
        adapter_folder_there: the same folder as the server sees it, where that is another path.
        timeout_s: for a whole answer.
    """

    base_url: str
    model: str
    key_file: Path | None = None
    kind: Literal["vllm", "openai"] = "vllm"
    logprobs: Literal["raw", "processed", "none"] = "raw"
    adapter_folder: Path | None = None
    adapter_folder_there: Path | None = None
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0

    @field_validator("base_url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("the address of an API is http(s)://host:port/v1")
        if parts.username or parts.password:
            raise ValueError("an address holds no key; name a key_file")
        if not parts.path.rstrip("/").endswith("/v1"):
            raise ValueError("the address of an OpenAI API ends in /v1")
        return url.rstrip("/")


class EngineSettings(Section):
    """The inference engine; `provider` must be effective or start-up fails.

    Attributes:
        kind: `onnx`, in this process; `upstream`, a model server behind this node.
        precision: of the base model as it is served; a site whose answers train keeps float32.
        provider_options: the runtime's own options of the provider, as texts.
    """

    kind: Literal["onnx", "upstream"] = "onnx"
    upstream: UpstreamSettings | None = None

    provider: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    precision: Literal["float32", "int8", "float16"] = "float32"
    slots: Annotated[int, Field(ge=1, le=256)] = 8
    context_tokens: Annotated[int, Field(ge=16)] = 2048
    threads: Annotated[int, Field(ge=1)] = 2
    provider_options: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_its_server(self) -> EngineSettings:
        if (self.kind == "upstream") != (self.upstream is not None):
            raise ValueError("engine.upstream is needed with engine.kind upstream, and only there")
        return self


class LoraSettings(Section):
    """Shape of the federation's adapters."""

    rank: Annotated[int, Field(ge=1, le=256)] = 8
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16.0

    @property
    def shape(self) -> LoraShape:
        return LoraShape(self.rank, self.alpha, TARGET_MODULES)


class TrainingSettings(Section):
    """How this machine trains; nothing here but `min_samples` and `records` changes the privacy mechanism.

    Attributes:
        min_samples: units a site must have to take part, by a noisy count; 0 to take part always and not count.
        records: which a round takes of those it has not had: `all`, or those whose agent has committed them since.
        commit_wait_s: how long a plan waits for agents to commit, before it is trained on what there is; default: 600
            with `records` committed, else 0.
        physical_batch: rows per forward pass; `auto` takes what half of the free memory holds.
        engine: `flat`, or `one-unit` for half the memory.
        precision: of the frozen base; adapters and gradients are float32.
        gradient_checkpointing: recompute activations; less memory, about a third more time.
        iteration_limit_s: longest expected private step; a longer one is refused before anything is charged.
    """

    min_samples: Annotated[int, Field(ge=0)] = 100
    records: Literal["all", "committed"] = "all"
    commit_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    physical_batch: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    engine: Literal["flat", "one-unit"] = "flat"
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    gradient_checkpointing: bool = False
    iteration_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0

    @property
    def waits_s(self) -> float:
        """How long a plan waits for a commit."""
        if self.commit_wait_s is not None:
            return self.commit_wait_s
        return _COMMIT_WAIT_S if self.records == "committed" else 0.0

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


class LimitSettings(Section):
    """What one caller may take; beyond it a request is refused, and others go on.

    Attributes:
        body_bytes: of a request's body.
        prompt_characters: of all messages; default: what fits the context at the longest tokens.
        max_tokens: a request may ask for; default: what fits the context.
        default_max_tokens: for a request that does not say.
        choices: `n` of a request.
        requests_per_key: open at once; further ones are told to come back (429).
        waiting: generations that wait for a slot, over all keys; further ones are told to come back (429).
        header_timeout_s, body_timeout_s, send_timeout_s: for a client's headers, its body, and reading one event.
        shutdown_s: how long running answers may take to finish when the node is stopped.
    """

    body_bytes: Annotated[int, Field(ge=1024, le=2**30)] = 2**20
    prompt_characters: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    default_max_tokens: Annotated[int, Field(ge=1)] = 256
    choices: Annotated[int, Field(ge=1, le=16)] = 16
    requests_per_key: Annotated[int, Field(ge=1)] = 512
    waiting: Annotated[int, Field(ge=1)] = 1024
    header_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    body_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    send_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    shutdown_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0


class VariantSettings(Section):
    """An arm of an A/B comparison: a version this site has adopted, and its share of the conversations."""

    version: str
    share: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Membership:
    """The federation a site belongs to, and whose signatures it believes."""

    federation: str
    hub: Path
    hub_public: bytes
    aggregator_public: bytes


_MEMBERSHIP = ("federation", "hub", "hub_key", "aggregator_key")


class EdgeConfig(Section):
    """One edge node; with no setting at all it serves the embedded model on loopback.

    Attributes:
        federation: whose plans this site follows; with `hub`, `hub_key` and `aggregator_key`, or none of them.
        name: the site's name in the roster.
        data_dir: keys, trajectories, ledger and finished updates; made on first start.
        policy: the site's own law, `policy.toml`; without one the node only serves.
        hub: folder of the hub's repository.
        hub_key, aggregator_key: hex Ed25519 public keys this site trusts.
        host, port: where the HTTP API listens; elsewhere than on loopback there must be API keys.
        variants: arms beside stable and canary, by name.
        log_requests: one line a request, without its content.
        selection: which answered requests become training data: a built-in strategy, or `package.module:Class`.
        selection_rate: share of answered requests that `sampling-rate` selects.
        selection_wait_s: how long an answer waits in memory for a mark or feedback that decides about it.
    """

    federation: str | None = None
    name: str = "site"
    data_dir: Path = Path("headwater-data")
    policy: Path = Path("policy.toml")
    hub: Path | None = None
    hub_key: str | None = None
    aggregator_key: str | None = None
    model: Path = EMBEDDED
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8010
    limits: LimitSettings = LimitSettings()
    variants: dict[str, VariantSettings] = Field(default_factory=dict)
    log_requests: bool = False
    engine: EngineSettings = EngineSettings()
    agent: AgentSettings = AgentSettings()
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
    def _key(cls, key: str | None) -> str | None:
        if key is not None and not re.fullmatch(r"[0-9a-f]{64}", key):
            raise ValueError("a public key is 64 hexadecimal digits")
        return key

    @field_validator("variants")
    @classmethod
    def _arms(cls, variants: dict[str, VariantSettings]) -> dict[str, VariantSettings]:
        for name in variants:
            if not _NAME.fullmatch(name) or name in ("stable", "canary", "pinned"):
                raise ValueError(f"{name!r} is no name for a variant")
        if sum(variant.share for variant in variants.values()) > 1:
            raise ValueError("the shares of variants are together more than 1")
        return variants

    @model_validator(mode="after")
    def _whole_membership(self) -> EdgeConfig:
        given = [name for name in _MEMBERSHIP if getattr(self, name) is not None]
        missing = [name for name in _MEMBERSHIP if name not in given]
        if given and missing:
            raise ValueError(
                f"{given[0]} is set but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; "
                "to follow a federation set all of them, to serve alone none"
            )
        return self

    @property
    def membership(self) -> Membership | None:
        """The federation this site belongs to; None where it serves alone."""
        if self.federation is None or self.hub is None or self.hub_key is None or self.aggregator_key is None:
            return None
        return Membership(self.federation, self.hub, bytes.fromhex(self.hub_key), bytes.fromhex(self.aggregator_key))

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
