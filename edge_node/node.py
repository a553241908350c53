"""One site's node: serve, collect, train, adopt, on this machine's disk.

Everything that must survive a restart lies under `data_dir`; a node opened again
goes on where it stopped. The site's policy is asked before every collection,
training and upload.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fastapi import FastAPI

from common.adapter import Adapter, initial_adapter
from common.errors import HeadwaterError, PrivacyError, RoundError, TransportError, TrustError
from common.identity import load_or_create_secret, load_or_create_signing_key
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import open_model
from common.plan import RoundPlan, Training, verify_plan
from common.process_lock import ProcessLock
from common.secagg import Terms
from common.telemetry import log_event
from common.update import PrivateUpdate, SealedUpdate, seal_update
from edge_node.adopting import golden
from edge_node.adopting.adopt import Adopter
from edge_node.agent import http_api as agent_api
from edge_node.collecting.commits import Commits
from edge_node.collecting.contract import TrainingContract
from edge_node.collecting.pending import Pending
from edge_node.collecting.recorder import Recorder
from edge_node.collecting.selection import strategy_of
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Feedback
from edge_node.config import EdgeConfig, Membership
from edge_node.policy import PolicyFile, SitePolicy
from edge_node.rewards.task_reward import REWARDS
from edge_node.secure_session import SecureSessions, is_ready, offered_terms
from edge_node.serving import trinity_api
from edge_node.serving.engines import open_engine
from edge_node.serving.exchange import Exchange
from edge_node.serving.keys import open_keys
from edge_node.serving.openai_api import create_app
from edge_node.serving.response_ids import ResponseIds
from edge_node.serving.router import Arms, Choice, Router, ServedVersion
from edge_node.training.background import BackgroundTraining
from edge_node.training.dataset import Dataset
from edge_node.training.schedule import Asked, Held, Schedule
from edge_node.training.site_training import SiteTraining
from model_hub.evidence import PairedOutcome

logger = logging.getLogger("headwater.edge")

SEALED = "sealed"
_GOLDEN_MAX_TOKENS = 48
_GOLDEN_PROMPTS = 100
_BASE_VERSION = "base"


class EdgeNode:
    """Opens a node; `close` ends its engine thread.

    Args:
        clock: seconds since the epoch.
        unsafe_no_noise: train without noise and without charge; for simulations, and for public data.
        alone: refuse to share the folder with another node. False for a command that looks or imports beside a running
            node, and for simulations, whose sites several processes open in turn: no plan waits there.
    Raises:
        ConfigError: another node has this folder open.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        clock: Callable[[], float],
        unsafe_no_noise: bool = False,
        alone: bool = True,
    ) -> None:
        self.name = config.name
        self._config = config
        self._clock = clock
        self._membership = config.membership
        config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(config.data_dir) if alone else None
        try:
            self._open(unsafe_no_noise)
        except BaseException:
            self._unlock()
            raise
        if alone:
            self._schedule.resume()

    def _open(self, unsafe_no_noise: bool) -> None:
        config, data, clock = self._config, self._config.data_dir, self._clock
        self.keys = open_keys(config)
        self.key = load_or_create_signing_key(data / "keys" / "identity.pem")
        pseudonym_key = load_or_create_secret(data / "keys" / "pseudonyms.key")
        ids = ResponseIds(load_or_create_secret(data / "keys" / "responses.key"))
        self.policy = PolicyFile(config.policy)
        self.store = TrajectoryStore(data / "trajectories", load_or_create_secret(data / "keys" / "trajectories.key"))
        self.model = open_model(config.model)
        tokenizer = ChatTokenizer(self.model)
        self.recorder = Recorder(
            site=self.name,
            store=self.store,
            policy=self.policy,
            strategy=strategy_of(config.selection, rate=config.selection_rate),
            pending=Pending(wait_s=config.selection_wait_s),
            pseudonym_key=pseudonym_key,
            base_digest=self.model.digest,
            decode=tokenizer.decode,
            clock=clock,
            ids=ids,
        )
        self._background = BackgroundTraining()
        self.training = SiteTraining(
            data,
            self.key,
            site=self.name,
            folder=self.model,
            tokenizer=tokenizer,
            store=self.store,
            lora=config.lora,
            settings=config.training,
            clock=clock,
            unsafe_no_noise=unsafe_no_noise,
        )
        self._secure = self._secure_sessions()
        self.contract = TrainingContract(
            self.recorder,
            config.rewards,
            window_after_s=self.training.commits_from_s,
            commits=Commits(data / "committed"),
        )
        self._schedule = Schedule(
            data / "held-plan.json",
            self.contract.commits,
            wait_s=config.training.waits_s,
            expected_s=self._expected_s,
            begin=self._begin,
            clock=clock,
        )
        start = initial_adapter(self.model.module_shapes(), config.lora.shape, seed=0)
        self._engine = open_engine(config, self.model, tokenizer, start)
        self.router = Router(Arms(ServedVersion(_BASE_VERSION, self._engine.load(start))))
        self.service = self._engine.chat
        self._tokenizer = tokenizer
        self._start = start
        self.probe = self._engine.probe(self.router, self._published, clock)
        self._adopter = self._adopter_of(self._membership, start) if self._membership is not None else None
        self._resume()
        self.recorder.purge()
        self.app: FastAPI = create_app(
            self.service,
            self.router,
            self.recorder,
            provider=self.provider,
            precision=self._engine.precision,
            limits=config.limits,
            keys=self.keys,
            ids=ids,
            load=self._engine.queue,
            probe=self.probe,
            routers=[
                trinity_api.router(self.contract),
                agent_api.router(config.agent, send_timeout_s=config.limits.send_timeout_s),
            ],
            open_paths=agent_api.OPEN_PATHS,
        )

    @property
    def provider(self) -> str:
        """The runtime's effective execution provider."""
        return self._engine.provider

    def close(self) -> None:
        self._schedule.close()
        self._engine.close()
        self._background.close()
        self.store.close()
        self.training.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    # --- adopt

    def _adopter_of(self, membership: Membership, start: Adapter) -> Adopter:
        return Adopter(
            membership.hub,
            self.router,
            self._engine,
            hub_public=membership.hub_public,
            like=start,
            base_digest=self.model.digest,
            kept=self._config.data_dir / "adopted",
            variants=self._config.variants,
            check=self.probe.check,
        )

    def _published(self, version_id: str) -> Adapter:
        """A version's adapter from its verified files; the base model's is made anew."""
        if version_id == _BASE_VERSION or self._adopter is None:
            return self._start
        return self._adopter.kept(version_id)

    def _resume(self) -> None:
        if self._adopter is None:
            return
        try:
            self._adopter.resume()
        except (TrustError, TransportError) as error:
            log_event(logger, "kept versions refused", site=self.name, reason=str(error))
        self._engine.adopted()

    def probe_all(self) -> None:
        """Compare what is served with what was published; what is not is logged and `/readyz` says it."""
        for report in self.probe.run():
            if not report.matches:
                log_event(logger, "not served as published", version=report.version, reason=report.reason)

    def look_again(self) -> None:
        """Adopt what the hub published, if it verifies, and delete records past their time."""
        if self._adopter is not None:
            try:
                self._adopter.look_again()
            except (TrustError, TransportError) as error:
                log_event(logger, "adoption refused", site=self.name, reason=str(error))
        if not all(report.matches for report in self.probe.reports.values()):
            self.probe_all()  # a server that was out of reach may be back
        self.recorder.purge()

    def replay_golden(
        self, prompts: Sequence[str], *, canary_id: str, control_id: str, task: str, seed: int
    ) -> list[PairedOutcome]:
        """Outcomes of public prompts on both arms.

        Raises:
            PrivacyError: there is no valid policy, so nothing leaves.
            RoundError: the node does not serve these two versions, or cannot score the task.
        """
        self.policy.law()
        canary, control = self.router.arm("canary"), self.router.arm("stable")
        served = (canary.version.id if canary else None, control.version.id if control else None)
        if canary is None or control is None or served != (canary_id, control_id):
            raise RoundError(
                f"asked about {canary_id} and {control_id}, serving {served}",
                public="the site does not serve the versions it was asked about",
            )
        if task not in REWARDS or len(prompts) > _GOLDEN_PROMPTS:
            raise RoundError(
                f"cannot replay {len(prompts)} prompts of {task!r}", public="unknown task or too many prompts"
            )

        async def replayed(canary: Choice, control: Choice) -> list[PairedOutcome]:
            limit = _GOLDEN_MAX_TOKENS
            try:
                return await golden.replay(
                    self.service, prompts, canary=canary, control=control, task=task, max_tokens=limit, seed=seed
                )
            finally:
                await self._engine.release()

        return asyncio.run(replayed(canary, control))

    # --- collect

    def record(self, exchange: Exchange) -> None:
        """Store an answered request where policy and selection say so; never fails the request."""
        self.recorder.record(exchange)

    def add_feedback(self, trajectory_id: str, feedback: Feedback) -> int:
        """Keep what a user said about an answer, where it was recorded; the number of records it was added to.

        Raises:
            PrivacyError: there is no valid policy.
            ValueError: the rating is not a number.
        """
        return self.recorder.add_feedback(trajectory_id, feedback)

    def import_records(self, lines: Iterable[str]) -> int:
        """Store what another system recorded, under this site's law; how many records.

        Raises:
            ConfigError: a line is not one of the known formats; nothing was stored.
            PrivacyError: there is no valid policy, or it forbids collecting.
        """
        stable = self.router.arms.stable.id
        return self.recorder.import_records(lines, tokenizer=self._tokenizer, model_version=stable)

    @property
    def commits(self) -> Commits:
        """What the schedule waits on: agents have said all they will say about some answers."""
        return self.contract.commits

    # --- train and hand over

    def dataset(self, training: Training) -> Dataset:
        """What a round on the stable version would train on now; for the site's own people only."""
        law = self.policy.law()
        return self.training.dataset(
            training,
            law,
            self.recorder.redactor(law),
            adapter_version=self.router.arms.stable.id,
            window_s=self.training.open_window(law),
        )

    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]] = ()
    ) -> SealedUpdate | None:
        """The finished update for a plan, or one for an earlier plan that was never used; None while it is trained.

        Returns at once: where neither is there, training begins beside the messages when it is due (`schedule.py`).

        Args:
            earlier: payloads and signatures of plans whose updates the aggregator still takes from this site.
        Raises: what `sealed_update` raises, and what its training raised since the last call.
        """
        plan, law = self._accepted(payload, signature, witness)
        if self._background.is_busy:
            return None
        known = [plan, *(self._verified(*signed) for signed in earlier)]
        for finished in (one for one in known if self.training.updates.get(one.digest) is not None):
            return self._sealed(finished, law)
        if not self._trained_beside(Asked(plan, payload, signature, witness, SEALED), law):
            return None
        return self._sealed(plan, law)

    def secure_answer(
        self,
        payload: bytes,
        signature: bytes,
        witness: str,
        *,
        mode: str,
        request: bytes,
        train_beside: bool = True,
    ) -> bytes | None:
        """This site's part in one step of a secure session; None while the update for the plan is trained.

        Args:
            witness: as for `sealed_update`.
            mode: of aggregation; the site's policy must name it.
            request: of the session, or `Ready` to ask whether the update is there, which is answered with nothing.
            train_beside: train beside the messages and return at once; otherwise within this call.
        Raises:
            PrivacyError: policy, budget or the update's own state say no.
            TrustError: the plan, or the request, is not what an honest aggregator sends.
        """
        plan, law = self._verified(payload, signature), self._law_for_uploads(mode)
        assert self._secure is not None  # there is a membership
        if self._secure.is_live(plan, mode, request):
            return self._secure.step(request)
        ready = is_ready(request)
        self._accepted(payload, signature, witness, mode=mode)
        if train_beside and self._background.is_busy:
            return None
        stored = self.training.updates.get(plan.digest) is not None
        if not (stored or ready):
            reason = "a session is offered before this site was asked whether it is ready"
            raise TrustError(reason, public=reason)
        self._check_summable(plan, law, mode, offered_terms(request) if ready else None)
        beside = train_beside and not stored
        if beside and not self._trained_beside(Asked(plan, payload, signature, witness, mode), law):
            return None
        update, head = self._update(plan, law), self.training.ledger_head
        self._law_for_uploads(mode)  # (2) again
        if ready:
            return b""
        return self._secure.begin(request, plan, law, mode=mode, update=update, ledger_head=head)

    def _trained_beside(self, asked: Asked, law: SitePolicy) -> bool:
        """Whether the update for a plan has been made beside the messages; begins it when it is due.

        Raises: what its training raised since the last call.
        """
        if not self._schedule.may_begin(asked):
            return False
        plan = asked.plan
        return self._background.result(plan.digest, lambda: self._update(plan, law)) is not None

    def _begin(self, held: Held) -> None:
        """Train for a held plan that is due, under the law in force now."""
        if self.training.updates.get(held.plan_digest) is not None:
            return
        try:
            plan, law = self._accepted(held.payload, held.signature, held.witness, mode=held.mode)
            if held.mode != SEALED:
                self._check_summable(plan, law, held.mode)
        except HeadwaterError as error:  # the aggregator is told when it asks again
            log_event(logger, "held plan refused", site=self.name, plan=held.plan_digest[:12], reason=str(error))
            return
        self._background.begin(plan.digest, lambda: self._update(plan, law))

    def _expected_s(self, held: Held) -> float:
        plan = self._verified(held.payload, held.signature)
        return self.training.expected_s(plan, self._adapter_of(plan))

    def sealed_update(self, payload: bytes, signature: bytes, witness: str) -> SealedUpdate:
        """The finished update for a plan, trained now if it is not there yet.

        Args:
            witness: the last state of this site's ledger that the aggregator has seen; empty for none.
        Raises:
            PrivacyError: the site's policy or budget says no.
            TrustError: the plan, what it names, or the ledger does not verify.
        """
        return self._sealed(*self._accepted(payload, signature, witness))

    def _secure_sessions(self) -> SecureSessions | None:
        if self._membership is None:
            return None
        folder, server = self._config.data_dir / "secure", self._membership.aggregator_public
        return SecureSessions(folder, name=self.name, key=self.key, server=server)

    def _verified(self, payload: bytes, signature: bytes) -> RoundPlan:
        if self._membership is None:
            raise TrustError("this node follows no federation", public="this site follows no federation")
        return verify_plan(payload, signature, aggregator=self._membership.aggregator_public)  # (1) the aggregator's

    def _accepted(
        self, payload: bytes, signature: bytes, witness: str, *, mode: str = SEALED
    ) -> tuple[RoundPlan, SitePolicy]:
        """A plan this site may train for, under the law in force."""
        plan = self._verified(payload, signature)  # (1)
        law = self._law_for_uploads(mode)  # (2) there is a law and it allows this
        self._check(plan)
        self.training.check_witness(witness)  # (7) this ledger has not been set back
        return plan, law

    def _check_summable(self, plan: RoundPlan, law: SitePolicy, mode: str, offered: Terms | None = None) -> None:
        """Raise where a secure round would not take this site's update, before it is trained and paid for."""
        assert self._secure is not None  # there is a membership
        adapter = self._adapter_of(plan)
        dimension = sum(adapter.tensors[name].size for name in adapter.names(plan.lora_phase))
        self._secure.check(plan, law, mode=mode, dimension=dimension, offered=offered)  # (9)

    def _update(self, plan: RoundPlan, law: SitePolicy) -> PrivateUpdate:
        return self.training.update_for(plan, law, self._adapter_of(plan), self.recorder.redactor(law))

    def _sealed(self, plan: RoundPlan, law: SitePolicy) -> SealedUpdate:
        update = self._update(plan, law)
        self._law_for_uploads(SEALED)  # (2) again: training takes its time
        return seal_update(update, plan, site=self.name, key=self.key, ledger_head=self.training.ledger_head)

    def _law_for_uploads(self, mode: str) -> SitePolicy:
        law = self.policy.law()
        if not law.upload.updates or mode not in law.upload.aggregation:
            raise PrivacyError(
                f"policy.toml does not allow uploading updates in mode {mode!r}",
                public="the site's policy does not allow uploads in this mode",
            )
        return law

    def _check(self, plan: RoundPlan) -> None:
        for holds, reason in (
            (plan.federation == self._config.federation, "the plan is of another federation"),  # (3) ours
            (self.name in plan.weights, "the plan does not name this site"),  # (4) this site takes part
            (plan.base_digest == self.model.digest, "the plan is for another base model"),  # (5) same base
            (plan.deadline_s >= self._clock(), "the plan's deadline has passed"),  # (6) in time
        ):
            if not holds:
                raise TrustError(reason, public=reason)

    def _adapter_of(self, plan: RoundPlan) -> Adapter:
        assert self._adopter is not None  # there is a membership
        adapter = self._adopter.fetch(plan.adapter_version)
        if adapter.digest != plan.adapter_digest:  # (8) the adapter the plan means
            raise TrustError(f"the plan's digest of {plan.adapter_version} is not the published one")
        return adapter


def _locked(data_dir: Path) -> ProcessLock:
    return ProcessLock(
        data_dir / "node.lock",
        refusal=f"another node runs on {data_dir}; stop it first, or give this one a data_dir of its own",
    )
