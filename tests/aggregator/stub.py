"""Sites that hand over updates without a model, and an aggregator for them; for tests of whole rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.cohort import Report
from aggregator.federation import Federation
from aggregator.round_log import RoundLog, RoundRecord
from aggregator.server_app import Reference, run_rounds
from aggregator.witness import Witness
from common.adapter import Adapter
from common.identity import SigningKey
from common.plan import RoundPlan, Training, verify_plan
from common.secagg.context import DEFAULT_LIMITS, Limits
from common.update import LedgerHead, PrivateUpdate, SealedUpdate, seal_bytes, seal_update
from deploy.local_grid import Faults, LocalGrid
from edge_node.client_app import make_client_app
from model_hub.evidence import PairedOutcome, Thresholds
from model_hub.hub import Hub

AGGREGATOR = SigningKey(Ed25519PrivateKey.generate())
TRAINING = Training("dpo", "sgd", 30.0, 2, 0.5, 100.0, 0.1, {"beta": 0.1})
BASE = "b" * 64

Misbehave = Callable[["StubSite", RoundPlan, PrivateUpdate], SealedUpdate | None]


def new_key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


@dataclass
class StubSite:
    """Hands over a fixed direction at the clip norm; `misbehave` may send anything instead."""

    name: str
    adapter: Adapter
    key: SigningKey = field(default_factory=new_key)
    aggregator: SigningKey = AGGREGATOR
    misbehave: Misbehave | None = None
    golden: Callable[[int], list[PairedOutcome]] = lambda count: [PairedOutcome(False, False, 0.6, 0.5)] * count

    asked: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)
    plans: list[RoundPlan] = field(default_factory=list)
    earlier: list[list[str]] = field(default_factory=list)

    def look_again(self) -> None:
        return None

    def update(self, plan: RoundPlan) -> PrivateUpdate:
        names = self.adapter.names(plan.lora_phase)
        rng = np.random.default_rng(int(self.name.split("-")[1]))
        drawn = {n: 1.0 + 0.1 * rng.normal(size=self.adapter.tensors[n].shape) for n in names}
        norm = np.sqrt(sum((t**2).sum() for t in drawn.values()))
        tensors = {n: (t * (plan.clip_norm / norm)).astype(np.float32) for n, t in drawn.items()}
        shapes = {n: t.shape for n, t in tensors.items()}
        return PrivateUpdate(plan.digest, shapes, np.concatenate([t.reshape(-1) for t in tensors.values()]), "e" * 64)

    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]] = ()
    ) -> SealedUpdate | None:
        plan = verify_plan(payload, signature, aggregator=self.aggregator.public)
        self.plans.append(plan)
        self.earlier.append([verify_plan(*signed, aggregator=self.aggregator.public).digest for signed in earlier])
        update = self.update(plan)
        if self.misbehave is not None:
            return self.misbehave(self, plan, update)
        return self.sealed(plan, update)

    def sealed(self, plan: RoundPlan, update: PrivateUpdate | None = None) -> SealedUpdate:
        """As an honest site seals it."""
        return seal_update(update or self.update(plan), plan, site=self.name, key=self.key, ledger_head=head(self.key))

    def secure_answer(
        self, payload: bytes, signature: bytes, witness: str, *, mode: str, request: bytes
    ) -> bytes | None:
        raise NotImplementedError

    def replay_golden(
        self, prompts: list[str], *, canary_id: str, control_id: str, task: str, seed: int
    ) -> list[PairedOutcome]:
        self.asked.append((canary_id, tuple(prompts), seed))
        return self.golden(len(prompts))


def head(key: SigningKey) -> str:
    """The head of a ledger with one row."""
    return LedgerHead.signed(1, "e" * 64, key).encode()


def raises(error: BaseException) -> Misbehave:
    def misbehave(*_: object) -> SealedUpdate:
        raise error

    return misbehave


def sends(change: Callable[[PrivateUpdate], bytes]) -> Misbehave:
    def misbehave(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        return seal_bytes(
            change(update), plan, site=site.name, key=site.key, ledger_entry="e" * 64, ledger_head=head(site.key)
        )

    return misbehave


def six(start: Adapter, **misbehaving: Misbehave) -> list[StubSite]:
    return [StubSite(f"site-{i}", start, misbehave=misbehaving.get(f"site_{i}")) for i in range(1, 7)]


def clock() -> float:
    return 1000.0


def new_hub(folder: Path, start: Adapter) -> Hub:
    """A hub whose canaries are decided as soon as there is evidence."""
    hub = Hub(folder, new_key(), base_model="embedded", clock=clock, thresholds=Thresholds(minimum_time_s=0.0))
    hub.found(start, base_digest=BASE)
    return hub


def federation_of(
    roster: Sequence[StubSite],
    *,
    rule: str = "nnm-trimmed-mean",
    rounds: int = 1,
    timeout_s: float = 20.0,
    lora_mode: str = "alternate",
    balance: bool = False,
    patience: int = 0,
    longest_lag: int = 5,
    aggregation: str = "sealed",
    word_bits: int = 32,
    key: SigningKey = AGGREGATOR,
    step_timeout_s: float = 120.0,
    limits: Limits = DEFAULT_LIMITS,
) -> Federation:
    return Federation(
        name="test",
        roster={site.name: site.key.public for site in roster},
        weights={site.name: 1 for site in roster},
        key=key,
        training=TRAINING,
        rule=rule,
        planned_rounds=rounds,
        clip_norm=2.0,
        collect_timeout_s=timeout_s,
        step_timeout_s=step_timeout_s,
        lora_mode=lora_mode,
        balance=balance,
        patience=patience,
        longest_lag=longest_lag,
        aggregation=aggregation,
        word_bits=word_bits,
        limits=limits,
    )


@contextmanager
def grid_of(sites: Sequence[StubSite], *, faults: Faults = lambda message: None) -> Iterator[LocalGrid]:
    app = make_client_app(lambda context: sites[int(context.node_config["partition-id"])])
    grid = LocalGrid(app, len(sites), workers=max(1, len(sites)), faults=faults)
    try:
        yield grid
    finally:
        grid.close()


def home_of(hub: Hub) -> Path:
    """Where `run` keeps the aggregator's files beside a hub."""
    return hub.repository.folder.parent


@contextmanager
def log_of(hub: Hub, *, owned: bool = True) -> Iterator[RoundLog]:
    log = RoundLog(home_of(hub) / "rounds", owned=owned)
    try:
        yield log
    finally:
        log.close()


def run(
    sites: list[StubSite],
    hub: Hub,
    *,
    roster: list[StubSite] | None = None,
    wait: Callable[[str], None] = lambda reason: None,
    faults: Faults = lambda message: None,
    on_status: Report = lambda status: None,
    clock: Callable[[], float] = clock,
    at_most: int | None = None,
    reference: Reference | None = None,
    **settings: object,
) -> list[RoundRecord]:
    """All rounds that the log of this hub has left, or so many; a second call is a restarted aggregator."""
    ended: list[RoundRecord] = []

    class Enough(Exception):
        pass

    def on_round(record: RoundRecord) -> None:
        ended.append(record)
        if len(ended) == at_most:
            raise Enough

    federation = federation_of(roster or sites, **settings)  # type: ignore[arg-type]
    witness = Witness(home_of(hub) / "witness.json")
    with grid_of(sites, faults=faults) as grid, log_of(hub) as log, suppress(Enough):
        run_rounds(
            grid,
            federation,
            hub,
            witness,
            log,
            clock=clock,
            wait=wait,
            on_round=on_round,
            on_status=on_status,
            reference=reference,
        )
    return ended
