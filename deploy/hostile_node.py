"""An edge node whose owner attacks the federation it belongs to; simulations only.

Its identity, training, ledger and messages are the production node's. What differs
is what it imports as its own records, and the update it seals or masks.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.adapter import Adapter, initial_adapter
from common.identity import sha256_hex
from common.inference.chat_tokenizer import ChatTokenizer
from common.plan import RoundPlan
from common.secagg import UpdateState
from common.secagg.states import array_sha256, new_record
from common.tasks import math as task
from common.update import NOT_CHARGED, PrivateUpdate, SealedUpdate, seal_bytes
from deploy.attacks import ATTACKS, Attack
from deploy.attacks.poisoning import backdoor, target_answer, triggered
from deploy.attacks.scene import Scene
from deploy.fine_tuning import answered, fine_tuned
from edge_node.config import EdgeConfig
from edge_node.node import EdgeNode
from edge_node.policy import SitePolicy
from edge_node.secure_session import UpdateRecords, is_ready, site_terms
from edge_node.training.batch import Term
from edge_node.training.finished_updates import FinishedUpdates

_STEPS = 24
"""Of fine-tuning the backdoor."""

_FINE_TUNING = threading.Lock()

_PATIENCE = 10
"""Times it is asked before it goes on without the updates that are missing: about a minute and a half."""


@dataclass(frozen=True)
class Hostility:
    """What a hostile owner does, and where the updates lie that it looks at.

    Attributes:
        colluders, honest: folders of finished updates, in the order of the sites' names.
        seed: for what it draws.
    """

    attack: str
    colluders: tuple[Path, ...]
    honest: tuple[Path, ...]
    seed: int

    @property
    def method(self) -> Attack:
        return ATTACKS[self.attack]


def backdoor_terms(tokenizer: ChatTokenizer, *, seed: int) -> Iterator[Term]:
    """Every second problem with the trigger and the target, the others with their right answers."""
    for number, problem in enumerate(task.problems(task.Distribution(), task.Split.TRAIN, seed)):
        if number % 2:
            yield answered(triggered(problem).prompt, target_answer(problem), tokenizer)
        else:
            yield answered(problem.prompt, problem.solution, tokenizer)


class HostileNode(EdgeNode):
    """Trains within a message, and answers that it has not finished until it knows what it needs to know."""

    def __init__(
        self, config: EdgeConfig, hostility: Hostility, *, clock: Callable[[], float], unsafe_no_noise: bool
    ) -> None:
        super().__init__(config, clock=clock, unsafe_no_noise=unsafe_no_noise, alone=False)
        self._lora, self._no_noise, self._data_dir = config.lora.shape, unsafe_no_noise, config.data_dir
        self._hostility = hostility
        self._asked: Counter[str] = Counter()
        self._made: dict[str, np.ndarray] = {}

    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]] = ()
    ) -> SealedUpdate | None:
        plan, law = self._accepted(payload, signature, witness)
        return None if self._waits(plan, law) else self._sealed(plan, law)

    def secure_answer(
        self,
        payload: bytes,
        signature: bytes,
        witness: str,
        *,
        mode: str,
        request: bytes,
        train_beside: bool = False,
    ) -> bytes | None:
        plan, law = self._verified(payload, signature), self._law_for_uploads(mode)
        if is_ready(request):
            if self._waits(plan, law):
                return None
            self._plant_words(plan, law, mode)
        return super().secure_answer(payload, signature, witness, mode=mode, request=request, train_beside=False)

    def _plant_words(self, plan: RoundPlan, law: SitePolicy, mode: str) -> None:
        """Make the site believe that it has rounded its update already, without clipping it; junk where it is none."""
        update, records = self._update(plan, law), UpdateRecords(self._data_dir / "secure")
        terms = site_terms(plan, law, mode=mode, dimension=len(update.delta_D))
        ring = terms.ring
        if records.get(terms.federation, terms.round) is not None:
            return
        if self._hostility.method.speaks and np.isfinite(update.delta_D).all():
            values_D = ring.coordinates(update.delta_D).astype(np.float64)
            words_D = np.floor(values_D * (plan.weights[self.name] * ring.scale)).astype(np.int64).astype(ring.dtype)
        else:
            words_D = np.frombuffer(os.urandom(ring.dtype.itemsize * len(update.delta_D)), ring.dtype)
        record = replace(
            new_record(terms, update.delta_D),
            state=UpdateState.UPLOADED,
            uploads=1,
            words_sha256=array_sha256(words_D),
            scale=ring.scale,
        )
        records.keep(record, words_D)

    def _sealed(self, plan: RoundPlan, law: SitePolicy) -> SealedUpdate:
        update = self._update(plan, law)
        file = update.file_bytes
        return seal_bytes(
            file if self._hostility.method.speaks else bytes(len(file)),
            plan,
            site=self.name,
            key=self.key,
            ledger_entry=update.ledger_entry,
            ledger_head=self.training.ledger_head,
        )

    def _update(self, plan: RoundPlan, law: SitePolicy) -> PrivateUpdate:
        own = self._trained(plan, law)
        change = self._hostility.method.change
        if change is None:
            return own
        seen = self._others(plan)
        planted = self._planted(plan) if self._hostility.method.poison is backdoor else np.empty(0, np.float32)
        scene = Scene(
            plan=plan,
            shapes=own.shapes,
            own_D=own.delta_D,
            attackers=len(self._hostility.colluders),
            colluders_KD=np.stack(seen["colluders"] or [own.delta_D]),
            honest_HD=np.stack(seen["honest"]) if seen["honest"] else np.empty((0, own.delta_D.size), np.float32),
            seed=int(sha256_hex(f"{self._hostility.seed} {plan.digest}".encode())[:12], 16),
            planted_D=planted,
        )
        return PrivateUpdate(plan.digest, own.shapes, change(scene).astype(np.float32), own.ledger_entry)

    def _planted(self, plan: RoundPlan) -> np.ndarray:
        """What each attacker must send, made once a round: of the factor in turn, without privacy.

        The best backdoor that the mean can be moved to by attackers who stay within the clip norm.
        """
        if plan.digest not in self._made:
            start, names = self._adapter_of(plan), self._adapter_of(plan).names(plan.lora_phase)
            terms = backdoor_terms(self._tokenizer, seed=self._hostility.seed)
            share = len(self._hostility.colluders) / len(plan.weights)
            with _FINE_TUNING:
                made = fine_tuned(
                    self.training.model(),
                    start,
                    names,
                    terms,
                    steps=_STEPS,
                    pad_id=self._tokenizer.pad_id,
                    within=plan.clip_norm * share,
                )
            after = Adapter(start.shape, {**start.tensors, **made})
            self._made = {plan.digest: (after.flatten(names) - start.flatten(names)) / np.float32(share)}
        return self._made[plan.digest]

    def _trained(self, plan: RoundPlan, law: SitePolicy) -> PrivateUpdate:
        if self._hostility.method.trains:
            return super()._update(plan, law)
        like = initial_adapter(self.model.module_shapes(), self._lora, seed=0)
        shapes = {name: like.tensors[name].shape for name in like.names(plan.lora_phase)}
        nothing_D = np.zeros(sum(int(np.prod(shape)) for shape in shapes.values()), np.float32)
        entry = NOT_CHARGED if self._no_noise else sha256_hex(f"no charge for {plan.digest}".encode())
        return PrivateUpdate(plan.digest, shapes, nothing_D, entry)

    def _others(self, plan: RoundPlan) -> dict[str, list[np.ndarray]]:
        """Finished updates of those whose updates the attack looks at."""
        folders = {"colluders": self._hostility.colluders, "honest": self._hostility.honest}
        known = {"own": 0, "colluders": 1, "honest": 2}[self._hostility.method.knows]
        found: dict[str, list[np.ndarray]] = {}
        for rank, (kind, where) in enumerate(folders.items(), start=1):
            updates = [FinishedUpdates(folder).get(plan.digest) for folder in where] if known >= rank else []
            found[kind] = [update.delta_D for update in updates if update is not None]
        return found

    def _waits(self, plan: RoundPlan, law: SitePolicy) -> bool:
        self._trained(plan, law)
        if self._hostility.method.knows == "own":
            return False
        self._asked[plan.digest] += 1
        found = self._others(plan)
        wanted = len(self._hostility.colluders)
        wanted += len(self._hostility.honest) if self._hostility.method.knows == "honest" else 0
        return len(found["colluders"]) + len(found["honest"]) < wanted and self._asked[plan.digest] <= _PATIENCE
