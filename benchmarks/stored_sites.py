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
from common.update import LedgerHead, PrivateUpdate, SealedUpdate, seal_update
from model_hub.evidence import PairedOutcome

SHAPE = LoraShape(8, 16.0, TARGET_MODULES)


class StoredSite:
    """A site whose update for a plan is there already: a direction of its own at the clip norm."""

    def __init__(self, folder: Path, index: int, adapter: Adapter) -> None:
        self.name = f"site-{index + 1}"
        self.key = load_or_create_signing_key(folder / "keys" / f"{self.name}.pem")
        self._adapter = adapter
        self._seed = index
        self._sealed: dict[str, SealedUpdate] = {}

    def look_again(self) -> None:
        return None

    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]] = ()
    ) -> SealedUpdate:
        digest = sha256_hex(payload)
        if digest not in self._sealed:
            self._sealed = {digest: self._seal(parse_plan(payload))}
        return self._sealed[digest]

    def _seal(self, plan: RoundPlan) -> SealedUpdate:
        shapes = phase_shapes(self._adapter, plan.lora_phase)
        drawn = np.random.default_rng(self._seed).standard_normal(size_of(shapes), np.float32) + 0.5
        delta = drawn * np.float32(plan.clip_norm / np.linalg.norm(drawn))
        head = LedgerHead.signed(1, "e" * 64, self.key).encode()
        update = PrivateUpdate(plan.digest, shapes, delta, "e" * 64)
        return seal_update(update, plan, site=self.name, key=self.key, ledger_head=head)

    def replay_golden(
        self, prompts: list[str], *, canary_id: str, control_id: str, task: str, seed: int
    ) -> list[PairedOutcome]:
        return [PairedOutcome(False, False, 0.6, 0.5)] * len(prompts)


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
