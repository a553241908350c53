"""One site's node: serve, collect, train, adopt, on this machine's disk.

Everything that must survive a restart lies under `data_dir`; a node opened again
goes on where it stopped. The site's policy is asked before every collection,
training and upload.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Sequence

from fastapi import FastAPI

from common.adapter import Adapter, initial_adapter
from common.chat import Message
from common.errors import PrivacyError, RoundError, TransportError, TrustError
from common.identity import load_or_create_secret, load_or_create_signing_key
from common.inference.batching import Batcher
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine
from common.inference.model_folder import open_model
from common.plan import RoundPlan, Training, verify_plan
from common.telemetry import log_event
from common.update import SealedUpdate, seal_update
from edge_node.adopting import golden
from edge_node.adopting.adopt import Adopter
from edge_node.collecting.importing import import_lines
from edge_node.collecting.redaction import Redactor
from edge_node.collecting.selection import Decision, SamplingRate, SelectionStrategy
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Feedback, Trajectory
from edge_node.config import EdgeConfig
from edge_node.policy import PolicyFile, Redaction, ServeOnly, SitePolicy
from edge_node.rewards.task_reward import REWARDS
from edge_node.serving.chat_service import ChatService, Exchange
from edge_node.serving.openai_api import create_app
from edge_node.serving.router import Arms, Router, ServedVersion
from edge_node.training.dataset import Dataset
from edge_node.training.site_training import SiteTraining
from model_hub.evidence import PairedOutcome

logger = logging.getLogger("headwater.edge")

AGGREGATION_MODE = "sealed"
_GOLDEN_MAX_TOKENS = 48
_GOLDEN_PROMPTS = 100
_HOUR_S, _DAY_S = 3600.0, 86_400.0
_BASE_VERSION = "base"


class EdgeNode:
    """Opens a node; `close` ends its engine thread.

    Args:
        clock: seconds since the epoch.
        unsafe_no_noise: train without noise and without charge; simulations only.
    """

    def __init__(self, config: EdgeConfig, *, clock: Callable[[], float], unsafe_no_noise: bool = False) -> None:
        data = config.data_dir
        self.name = config.name
        self._config = config
        self._clock = clock
        self._aggregator_key = bytes.fromhex(config.aggregator_key)
        self.key = load_or_create_signing_key(data / "keys" / "identity.pem")
        self._pseudonym_key = load_or_create_secret(data / "keys" / "pseudonyms.key")
        self.policy = PolicyFile(config.policy)
        self.store = TrajectoryStore(data / "trajectories", load_or_create_secret(data / "keys" / "trajectories.key"))
        self._selection: SelectionStrategy = SamplingRate(config.selection_rate)
        self._redactor: tuple[Redaction, Redactor] | None = None

        self.model = open_model(config.model)
        tokenizer = ChatTokenizer(self.model)
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
        engine_settings = config.engine
        self._engine = Engine(
            self.model,
            provider=engine_settings.provider,
            slots=engine_settings.slots,
            context_tokens=engine_settings.context_tokens,
            threads=engine_settings.threads,
        )
        start = initial_adapter(self.model.module_shapes(), config.lora.shape, seed=0)
        self.router = Router(Arms(ServedVersion(_BASE_VERSION, self._engine.load(start))))
        self._batcher = Batcher(self._engine)  # a thread: started when nothing before it can fail any more
        self.service = ChatService(tokenizer, self._batcher)
        self._adopter = Adopter(
            config.hub,
            self.router,
            self._engine,
            hub_public=bytes.fromhex(config.hub_key),
            like=start,
            base_digest=self.model.digest,
            kept=data / "adopted",
        )
        self._resume()
        self._purged_at_s = 0.0
        self._purge()
        self.app: FastAPI = create_app(self.service, self.router, self, provider=self.provider)

    @property
    def provider(self) -> str:
        """The runtime's effective execution provider."""
        return self._engine.provider

    def close(self) -> None:
        self._batcher.close()
        self.store.close()
        self.training.close()

    # --- adopt

    def _resume(self) -> None:
        try:
            self._adopter.resume()
        except (TrustError, TransportError) as error:
            log_event(logger, "kept versions refused", site=self.name, reason=str(error))

    def look_again(self) -> None:
        """Adopt what the hub published, if it verifies, and delete records past their time."""
        try:
            self._adopter.look_again()
        except (TrustError, TransportError) as error:
            log_event(logger, "adoption refused", site=self.name, reason=str(error))
        self._purge()

    def _purge(self) -> None:
        """Delete records past their time: at start, with every message, and every hour of serving."""
        policy = self.policy.current()
        if not isinstance(policy, SitePolicy):
            return
        self._purged_at_s = self._clock()
        try:
            self.store.purge(before_s=self._oldest_allowed_s(policy))
        except OSError as error:
            log_event(logger, "old records not deleted", site=self.name, error=type(error).__name__)

    def _oldest_allowed_s(self, policy: SitePolicy) -> float:
        return self._clock() - policy.collection.retention_days * _DAY_S

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
        return asyncio.run(
            golden.replay(
                self.service,
                prompts,
                canary=canary,
                control=control,
                task=task,
                max_tokens=_GOLDEN_MAX_TOKENS,
                seed=seed,
            )
        )

    # --- collect

    def record(self, exchange: Exchange) -> None:
        """Store an answered request where policy and selection say so; never fails the request."""
        try:
            self._record(exchange)
        except Exception as error:  # outermost: what cannot be recorded was still answered
            reason = str(error) if isinstance(error, TransportError) else ""
            log_event(logger, "trajectory not stored", site=self.name, error=type(error).__name__, reason=reason)

    def _record(self, exchange: Exchange) -> None:
        policy = self.policy.current()
        if isinstance(policy, ServeOnly) or not policy.collection.enabled:
            return
        if self._clock() - self._purged_at_s > _HOUR_S:
            self._purge()
        decision = self._selection.decide()
        if not decision.accepted:
            return
        trajectories = [self._trajectory(exchange, index, decision) for index in range(len(exchange.answers))]
        redactor = self._redactor_for(policy)
        for trajectory in trajectories:
            redactor.redact(trajectory)
        self.store.append(trajectories)

    def add_feedback(self, trajectory_id: str, feedback: Feedback) -> int:
        """Keep what a user said about an answer, where it was recorded; the number of records it was added to.

        Raises:
            PrivacyError: there is no valid policy.
            ValueError: the rating is not a number.
        """
        law = self.policy.law()
        said = Trajectory(feedback=[feedback])
        self._redactor_for(law).redact(said)
        said.feedback[0].received_at_s = self._clock()
        return self.store.add_feedback(trajectory_id, said.feedback[0])

    def import_records(self, lines: Iterable[str]) -> int:
        """Store what another system recorded, under this site's law; how many records.

        Raises:
            ConfigError: a line is not one of the known formats; nothing was stored.
            PrivacyError: there is no valid policy, or it forbids collecting.
        """
        law = self.policy.law()
        if not law.collection.enabled:
            raise PrivacyError("policy.toml does not allow collecting; set collection.enabled")
        tokenizer, redactor = self.service.tokenizer, self._redactor_for(law)
        imported = import_lines(
            lines,
            encode_prompt=tokenizer.encode,
            encode_answer=tokenizer.encode_answer,
            pseudonym=self._pseudonym,
            model_version=self.router.arms.stable.id,
            now_s=self._clock(),
        )
        for trajectory in imported:
            trajectory.base_digest = self.model.digest  # whose tokenizer has just made its token ids
            redactor.redact(trajectory)
        self.store.append(imported)
        return len(imported)

    def _trajectory(self, exchange: Exchange, index: int, decision: Decision) -> Trajectory:
        request, answer = exchange.request, exchange.answers[index]
        generation, version = answer.generation, exchange.choice.version
        trajectory = Trajectory(
            id=exchange.id if len(exchange.answers) == 1 else f"{exchange.id}-{index}",
            request_id=exchange.id,
            choice_index=index,
            task_id=request.task_id,
            run_id=request.run_id,
            conversation_id=self._pseudonym(request.conversation_id).hex(),
            collected_at_s=self._clock(),
            base_digest=self.model.digest,
            model_version=version.id,
            adapter_digest=version.adapter.digest,
            arm=exchange.choice.arm,
            prompt_token_ids=exchange.prompt_ids,
            completion_token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            assistant_mask=[True] * len(generation.token_ids),
            finish_reason=generation.finish_reason,
        )
        if request.user is not None:
            trajectory.user_pseudonym = self._pseudonym(request.user)
        messages = [*request.messages, Message("assistant", answer.text)]
        for message in messages:
            trajectory.messages.add(role=message.role, content=message.content or "", name=message.name or "")
        trajectory.sampling.temperature = request.sampling.temperature
        trajectory.sampling.top_p = request.sampling.top_p
        trajectory.sampling.max_tokens = request.max_tokens or 0
        if request.seed is not None:
            trajectory.sampling.seed = request.seed + index
        trajectory.timings.wait_s = generation.wait_s
        trajectory.timings.first_token_s = generation.first_token_s
        trajectory.timings.decode_s = generation.decode_s
        trajectory.selection.accepted = decision.accepted
        trajectory.selection.reason = decision.reason
        trajectory.selection.labels.extend(decision.labels)
        for reward in REWARDS.values():
            for source, value in (reward(messages) or {}).items():
                trajectory.rewards.add(source=source, value=value)
        return trajectory

    def _pseudonym(self, text: str) -> bytes:
        """A name that only this site can compute, so nobody can look texts up in it."""
        return hmac.digest(self._pseudonym_key, text.encode(), "sha256")

    def _redactor_for(self, policy: SitePolicy) -> Redactor:
        if self._redactor is None or self._redactor[0] != policy.redaction:
            self._redactor = (policy.redaction, Redactor(policy.redaction))
        return self._redactor[1]

    # --- train and hand over

    def dataset(self, training: Training) -> Dataset:
        """What a round on the stable version would train on now; for the site's own people only."""
        law = self.policy.law()
        return self.training.dataset(
            training,
            law,
            self._redactor_for(law),
            adapter_version=self.router.arms.stable.id,
            window_s=self.training.open_window(law),
        )

    def sealed_update(self, payload: bytes, signature: bytes, witness: str) -> SealedUpdate:
        """The finished update for a plan, trained now if it is not there yet.

        Args:
            witness: the last state of this site's ledger that the aggregator has seen; empty for none.
        Raises:
            PrivacyError: the site's policy or budget says no.
            TrustError: the plan, what it names, or the ledger does not verify.
        """
        plan = verify_plan(payload, signature, aggregator=self._aggregator_key)  # (1) the aggregator's
        law = self._law_for_uploads()  # (2) there is a law and it allows this
        self._check(plan)
        self.training.check_witness(witness)  # (7) this ledger has not been set back
        update = self.training.update_for(plan, law, self._adapter_of(plan), self._redactor_for(law))
        self._law_for_uploads()  # (2) again: training takes its time
        return seal_update(update, plan, site=self.name, key=self.key, ledger_head=self.training.ledger_head)

    def _law_for_uploads(self) -> SitePolicy:
        law = self.policy.law()
        if not law.upload.updates or AGGREGATION_MODE not in law.upload.aggregation:
            raise PrivacyError(
                f"policy.toml does not allow uploading updates in mode {AGGREGATION_MODE!r}",
                public=f"the site's policy does not allow uploads in mode {AGGREGATION_MODE}",
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
        adapter = self._adopter.fetch(plan.adapter_version)
        if adapter.digest != plan.adapter_digest:  # (8) the adapter the plan means
            raise TrustError(f"the plan's digest of {plan.adapter_version} is not the published one")
        return adapter
