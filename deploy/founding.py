"""A simulated federation on disk, before anything runs: keys, policies, configurations, the initial version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aggregator.federation import Federation
from common.adapter import PHASES, initial_adapter
from common.chat import Message
from common.errors import ConfigError
from common.identity import SigningKey, load_or_create_signing_key, sha256_hex
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder
from common.secagg import SKETCH, Limits
from common.secagg.context import DEFAULT_LIMITS
from common.secagg.sketch import LARGEST_SHARE, buckets_for
from common.tasks import math as task
from deploy.attacks.poisoning import triggered
from deploy.hostile_node import Hostility
from deploy.settings import SimulationSettings
from deploy.simulated_site import SimulatedClock, SiteSetup
from deploy.users import MAX_ANSWER_TOKENS
from deploy.world import Progress, World
from edge_node.config import EdgeConfig, EngineSettings
from model_hub.hub import Hub

FEDERATION = "simulation"
START_S = 1_767_225_600.0  # 2026-01-01; simulated time, so that a run looks the same on any day
_SLOTS = 64
_POLICY = """\
# The site's own law. Nothing the vendor sends can loosen it.
[privacy]
unit = "{unit}"
epsilon_total = {epsilon}
delta = {delta}

[upload]
updates = true
aggregation = ["{aggregation}"]
word_bits = {word_bits}

[choosing]
directions = {directions}
sketched_share = {sketched_share}
"""
_APPROVED = """
[[roster]]
name = "{name}"
key = "{key}"
organisation = "{name}"
"""


def with_room_for_sketches(settings: SimulationSettings, model: ModelFolder) -> SimulationSettings:
    """The settings, sealed where an adapter is too small for sketches that nobody asked for.

    Raises:
        ConfigError: somebody did.
    """
    adapter = initial_adapter(model.module_shapes(), settings.lora.shape, seed=settings.seed)
    smallest = min(adapter.flatten(adapter.names(phase)).size for phase in PHASES)
    if settings.mode != SKETCH or buckets_for(smallest, directions=_limits(settings)["directions"]):
        return settings
    if settings.aggregation == SKETCH:
        raise ConfigError(
            f"an update of {smallest} parameters is too small for sketches; raise lora.rank or use sealed"
        )
    return settings.model_copy(update={"aggregation": "sealed"})


def build_world(settings: SimulationSettings, model: ModelFolder, folder: Path, progress: Progress) -> World:
    """Keys, policies, configurations and the initial version, all on disk."""
    folder = folder.resolve()
    clock = SimulatedClock(folder / "clock.f8")
    clock.set(START_S)
    hub_key = load_or_create_signing_key(folder / "hub" / "hub.pem")
    aggregator_key = load_or_create_signing_key(folder / "aggregator" / "identity.pem")
    hub = Hub(folder / "hub", hub_key, base_model=settings.model.name, clock=clock)
    hub.found(initial_adapter(model.module_shapes(), settings.lora.shape, seed=settings.seed), base_digest=model.digest)
    engine = EngineSettings(slots=_SLOTS, context_tokens=_context_tokens(model), threads=1)
    roster = {name: load_or_create_signing_key(_identity(folder, name)).public for name in settings.site_names}

    def site(name: str, home: Path, distribution: task.Distribution, *, public: bool = False) -> SiteSetup:
        config = _config(settings, folder, name, home, hub_key, aggregator_key, engine, roster)
        return SiteSetup(
            config,
            clock.file,
            distribution,
            _hostility(settings, folder, name),
            settings.unsafe_no_dp or public,
            settings.answers_per_request,
            settings.kind,
        )

    kinds = task.SITE_DISTRIBUTIONS
    setups = [
        site(name, _home(folder, name), kinds[index % len(kinds)]) for index, name in enumerate(settings.site_names)
    ]
    federation = Federation(
        name=FEDERATION,
        roster=roster,
        weights=dict.fromkeys(roster, 1),
        key=aggregator_key,
        training=settings.training.plan(settings.algorithm),
        rule=settings.rule_name,
        aggregation=settings.mode,
        word_bits=settings.word_bits,
        planned_rounds=settings.rounds,
        clip_norm=settings.clip_norm,
        collect_timeout_s=settings.collect_timeout_s,
        step_timeout_s=settings.collect_timeout_s,
        lora_mode=settings.lora_mode,
        balance=settings.balance,
        optimizer=settings.server.plan(),
        patience=settings.patience,
        limits=Limits(**_limits(settings)),
    )
    reference = None
    if settings.has_reference:
        reference = site("reference", folder / "reference", task.Distribution(), public=True)
    return World(settings, folder, federation, hub, setups, clock, progress, reference)


def _context_tokens(model: ModelFolder) -> int:
    """Room for the longest problem and its answer in this model's tokens."""
    tokenizer = ChatTokenizer(model)
    longest = [triggered(task.Problem(99, "-", 88, phrasing)) for phrasing in range(len(task.PHRASINGS))]
    prompts = [problem.prompt for problem in longest]
    return max(len(tokenizer.encode([Message("user", prompt)])) for prompt in prompts) + MAX_ANSWER_TOKENS


def _config(
    settings: SimulationSettings,
    folder: Path,
    name: str,
    home: Path,
    hub_key: SigningKey,
    aggregator_key: SigningKey,
    engine: EngineSettings,
    roster: Mapping[str, bytes],
) -> EdgeConfig:
    """A node's configuration, and its policy on disk."""
    home.mkdir(exist_ok=True)
    policy = home / "policy.toml"
    law = _POLICY.format(
        unit=settings.unit,
        epsilon=settings.epsilon,
        delta=settings.delta,
        aggregation=settings.mode,
        word_bits=settings.word_bits,
        **_limits(settings),
    )
    if settings.mode != "sealed":
        law += "".join(_APPROVED.format(name=site, key=key.hex()) for site, key in roster.items())
    policy.write_text(law)
    policy.chmod(0o644)
    return EdgeConfig(
        federation=FEDERATION,
        name=name,
        data_dir=home / "data",
        policy=policy,
        model=settings.model.resolve(),
        hub=folder / "hub" / "repository",
        hub_key=hub_key.public.hex(),
        aggregator_key=aggregator_key.public.hex(),
        engine=engine,
        lora=settings.lora,
        training=settings.edge_training,
        selection_rate=0.0 if _poisons(settings, name) else 1.0,
    )


def _limits(settings: SimulationSettings) -> dict[str, Any]:
    """Of what the aggregator may see: a direction for the reference, and sketches in as many rounds as there are."""
    sketches = settings.mode == SKETCH
    share = max(DEFAULT_LIMITS.sketched_share, min(1.0, settings.rounds * LARGEST_SHARE)) if sketches else 0.0
    return {"directions": int(sketches and settings.has_reference), "sketched_share": share}


def _home(folder: Path, site: str) -> Path:
    return folder / "sites" / site


def _identity(folder: Path, site: str) -> Path:
    return _home(folder, site) / "data" / "keys" / "identity.pem"


def _poisons(settings: SimulationSettings, name: str) -> bool:
    """Whether a site's owner makes its records up."""
    return settings.attack_of(name) is not None and settings.method is not None and settings.method.poison is not None


def _hostility(settings: SimulationSettings, folder: Path, name: str) -> Hostility | None:
    """What the owner of a site does, and which updates it may look at; None for an honest one."""
    if settings.attack_of(name) is None:
        return None
    updates = {site: folder / "sites" / site / "data" / "updates" for site in settings.site_names}
    return Hostility(
        settings.attack_name,
        colluders=tuple(path for site, path in updates.items() if settings.attack_of(site) is not None),
        honest=tuple(path for site, path in updates.items() if settings.attack_of(site) is None),
        seed=derived_seed(settings.seed, "attack", name),
    )


def derived_seed(*parts: object) -> int:
    """A seed of its own for every use, so that no two of them share random streams."""
    return int(sha256_hex("/".join(map(str, parts)).encode())[:12], 16)
