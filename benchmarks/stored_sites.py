"""Sites of `grids.py` whose updates are there already; a module of its own, so that Ray's actors can import it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from flwr.app import Context

from aggregator.server_app import phase_shapes
from common.adapter import Adapter, LoraShape, initial_adapter
from common.identity import load_or_create_signing_key, sha256_hex
from common.inference.model_folder import EMBEDDED, TARGET_MODULES, open_model
from common.plan import RoundPlan, parse_plan
from common.secagg import MODES
from common.update import LedgerHead, PrivateUpdate, SealedUpdate, seal_update
from edge_node.policy import SitePolicy
from edge_node.secure_session import SecureSessions
from model_hub.evidence import PairedOutcome

SHAPE = LoraShape(8, 16.0, TARGET_MODULES)


class StoredSite:
    """A site whose update for a plan is there already: a direction of its own at the clip norm."""

    def __init__(self, folder: Path, index: int, adapter: Adapter) -> None:
        self.name = f"site-{index + 1}"
        self.key = load_or_create_signing_key(folder / "keys" / f"{self.name}.pem")
        self._folder = folder
        self._adapter = adapter
        self._seed = index
        self._sealed: dict[str, SealedUpdate] = {}
        self._sessions: SecureSessions | None = None

    def look_again(self) -> None:
        return None

    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]] = ()
    ) -> SealedUpdate:
        digest = sha256_hex(payload)
        if digest not in self._sealed:
            self._sealed = {digest: self._seal(parse_plan(payload))}
        return self._sealed[digest]

    def secure_answer(self, payload: bytes, signature: bytes, witness: str, *, mode: str, request: bytes) -> bytes:
        plan = parse_plan(payload)
        if self._sessions is None:
            server = load_or_create_signing_key(self._folder / "keys" / "aggregator.pem").public
            self._sessions = SecureSessions(self._folder / self.name, name=self.name, key=self.key, server=server)
        if self._sessions.is_live(plan, mode, request):
            return self._sessions.step(request)
        law, update = approving(self._folder), self._update(plan)
        return self._sessions.begin(request, plan, law, mode=mode, update=update, ledger_head=self._head())

    def _seal(self, plan: RoundPlan) -> SealedUpdate:
        return seal_update(self._update(plan), plan, site=self.name, key=self.key, ledger_head=self._head())

    def _update(self, plan: RoundPlan) -> PrivateUpdate:
        shapes = phase_shapes(self._adapter, plan.lora_phase)
        drawn = np.random.default_rng(self._seed).standard_normal(size_of(shapes), np.float32) + 0.5
        delta = drawn * np.float32(plan.clip_norm / np.linalg.norm(drawn))
        return PrivateUpdate(plan.digest, shapes, delta, "e" * 64)

    def _head(self) -> str:
        return LedgerHead.signed(1, "e" * 64, self.key).encode()

    def replay_golden(
        self, prompts: list[str], *, canary_id: str, control_id: str, task: str, seed: int
    ) -> list[PairedOutcome]:
        return [PairedOutcome(False, False, 0.6, 0.5)] * len(prompts)


@functools.cache
def approving(folder: Path) -> SitePolicy:
    """A law by which every site whose key is in the folder may take part in secure rounds."""
    keys = {file.stem: load_or_create_signing_key(file).public.hex() for file in folder.glob("keys/site-*.pem")}
    law = {
        "privacy": {"unit": "trajectory", "epsilon_total": 8.0, "delta": 1e-5},
        "upload": {"updates": True, "aggregation": ["sealed", *MODES]},
        "roster": [{"name": name, "key": key, "organisation": name} for name, key in keys.items()],
    }
    return SitePolicy.model_validate(law)


@functools.cache
def start() -> Adapter:
    return initial_adapter(open_model(EMBEDDED).module_shapes(), SHAPE, seed=0)


@functools.cache
def stored_site(folder: Path, index: int) -> StoredSite:
    """The site as this process has it; Ray's actors each have their own."""
    return StoredSite(folder, index, start())


def open_site(folder: Path) -> Callable[[Context], StoredSite]:
    return lambda context: stored_site(folder, int(context.node_config["partition-id"]))


def size_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())
