"""A site's training: its records, its ledger and its finished updates, under the policy in force.

`update_for` is called with a plan that has been verified. It hands over the stored
update where there is one; otherwise it looks at the data, asks the ledger, trains,
stores and commits, in this order. What may fail before anything is charged fails
before anything is charged.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from common.adapter import Adapter
from common.errors import ConfigError, PrivacyError, TransportError, TrustError
from common.identity import SigningKey, sha256_hex
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder
from common.plan import RoundPlan, Training
from common.telemetry import log_event
from common.update import NOT_CHARGED, LedgerHead, PrivateUpdate
from edge_node.collecting.redaction import Redactor
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.config import LoraSettings, TrainingSettings
from edge_node.policy import SitePolicy
from edge_node.training.batch import PassLimit
from edge_node.training.checkpoints import Checkpoints
from edge_node.training.dataset import LONGEST_ANSWER_TOKENS, Dataset, DatasetSettings, build_dataset, imbalance
from edge_node.training.finished_updates import FinishedUpdates
from edge_node.training.ledger import RESTORED, Ledger
from edge_node.training.lora_model import LoraModel
from edge_node.training.memory import free_bytes, pass_limit
from edge_node.training.noise import SecureRandom
from edge_node.training.objectives import GROUP_SIZE, objective_of
from edge_node.training.off_policy import with_behaviour_logps
from edge_node.training.readiness import require_enough_units
from edge_node.training.self_test import Check, self_test
from edge_node.training.step_time import seconds_per_unit
from edge_node.training.trainer import (
    DATA_STREAM,
    TRAINING,
    Round,
    check_training,
    open_budget,
    require_its_own_draws,
    round_name,
    train_privately,
)

logger = logging.getLogger("headwater.edge")

_DAY_S = 86_400.0
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PASSED: set[str] = set()
_TESTING = threading.Lock()
"""Sites of one process share the result: their model, settings and libraries are the same."""

_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-1, "float16": 1e-1}
"""Of the self-test's comparisons; the base computes in its own precision."""


class SiteTraining:
    """Trains for one site.

    Args:
        data_dir: the ledger, updates and checkpoints lie here.
        clock: seconds since the epoch.
        unsafe_no_noise: train without noise and without charge; for simulations, and for public data.
    """

    def __init__(
        self,
        data_dir: Path,
        key: SigningKey,
        *,
        site: str,
        folder: ModelFolder,
        tokenizer: ChatTokenizer,
        store: TrajectoryStore,
        lora: LoraSettings,
        settings: TrainingSettings,
        clock: Callable[[], float],
        unsafe_no_noise: bool = False,
    ) -> None:
        self._data_dir = data_dir
        self._site = site
        self._folder = folder
        self._tokenizer = tokenizer
        self._store = store
        self._lora = lora
        self._settings = settings
        self._clock = clock
        self._unsafe_no_noise = unsafe_no_noise
        self.updates = FinishedUpdates(data_dir / "updates")
        self.checkpoints = Checkpoints(data_dir / "checkpoints")
        self._ledger = _ledger_or_why_not(data_dir, key)
        self._model: LoraModel | None = None
        self._one_at_a_time = threading.Lock()
        self._seconds_per_unit: dict[str, float] = {}

    @property
    def ledger(self) -> Ledger:
        """The privacy ledger; raises TrustError where it was altered or damaged."""
        if isinstance(self._ledger, TrustError):
            public = self._ledger.public or "this site's privacy ledger does not verify"
            raise TrustError(str(self._ledger), public=public)
        return self._ledger

    def close(self) -> None:
        if isinstance(self._ledger, Ledger):
            self._ledger.close()

    def check_witness(self, witness: str) -> None:
        """Raise TrustError where someone has seen a later state of this site's ledger than there is here.

        Training stays off then, also for requests that come without a witness.
        """
        if not witness:
            return
        ledger = self.ledger
        try:
            ledger.check_witness(LedgerHead.parse(witness))
        except TrustError as error:
            if error.public == RESTORED:
                ledger.close()
                self._ledger = error
            raise

    @property
    def ledger_head(self) -> str:
        """For others to remember: what `check_witness` takes."""
        return "" if self._unsafe_no_noise else self.ledger.signed_head().encode()

    def update_for(self, plan: RoundPlan, law: SitePolicy, adapter: Adapter, redactor: Redactor) -> PrivateUpdate:
        """The finished update for a plan, trained now if it is not there yet.

        Raises:
            PrivacyError: budget, data or self-test say no.
            TrustError: the ledger or a stored update does not hold.
        """
        with self._one_at_a_time:
            return self._update_for(plan, law, adapter, redactor)

    def _update_for(self, plan: RoundPlan, law: SitePolicy, adapter: Adapter, redactor: Redactor) -> PrivateUpdate:
        stored = self.updates.get(plan.digest)
        if stored is None:
            stored = self._train(plan, law, adapter, redactor)
        if stored.ledger_entry != NOT_CHARGED:
            self._commit(plan, stored)
        elif not self._unsafe_no_noise:
            raise PrivacyError("the stored update was made without noise; it is not sent")
        self.checkpoints.remove(plan.digest)
        return stored

    def _commit(self, plan: RoundPlan, update: PrivateUpdate) -> None:
        """The ledger names exactly these bytes as the release of this round."""
        digest = sha256_hex(update.file_bytes)
        reservation = self.ledger.reservation(TRAINING, round_name(plan))
        if reservation is None or reservation.entry != update.ledger_entry:
            raise TrustError("the stored update names another charge than its round has; it is not sent")
        if reservation.outcome is None:
            self.ledger.commit(reservation.entry, digest, now_s=self._clock())
        elif reservation.outcome != digest:
            raise TrustError("the stored update is not the one that was committed; it is not sent")

    def _train(self, plan: RoundPlan, law: SitePolicy, adapter: Adapter, redactor: Redactor) -> PrivateUpdate:
        """What does not depend on the records is refused before they are read: its time says nothing of them."""
        ledger = self.ledger
        require_its_own_draws(plan, ledger, self.checkpoints)
        check_training(plan.training)
        if plan.training.lora_dropout > 0 and self._settings.gradient_checkpointing:
            raise PrivacyError(
                "the plan trains with dropout, which gradient_checkpointing does not repeat; switch one of them off",
                public="this site cannot train with dropout",
            )
        model = self._tested_model(adapter, plan.training.objective)
        self._require_short_steps(plan, adapter)
        if not self._unsafe_no_noise:
            counted = self._settings.min_samples > 0
            open_budget(plan, law.privacy, ledger, counted=counted, now_s=self._clock())
            ledger.require_room(round_name(plan), epsilon_total=law.privacy.epsilon_total, delta=law.privacy.delta)
        try:
            return self._train_on_records(plan, law, adapter, redactor, model)
        finally:
            if ledger.reservation(TRAINING, round_name(plan)) is None:
                self.checkpoints.remove(plan.digest)  # nothing was begun that could go on

    def _train_on_records(
        self, plan: RoundPlan, law: SitePolicy, adapter: Adapter, redactor: Redactor, model: LoraModel
    ) -> PrivateUpdate:
        key = self.checkpoints.key(plan.digest)
        after_s, until_s = self.checkpoints.window(plan.digest, self.open_window(law))
        window_s = max(after_s, self._oldest_s(law)), until_s
        dataset = self.dataset(
            plan.training, law, redactor, adapter_version=plan.adapter_version, window_s=window_s, key=key
        )
        self._warn(plan, dataset)
        if self._settings.min_samples > 0 and not self._unsafe_no_noise:
            self._require_data(plan, law, dataset)
        work = Round(
            plan=plan,
            adapter=adapter,
            units=dataset.units,
            pad_id=self._tokenizer.pad_id,
            limit=self._limit(model),
            engine=self._settings.engine,
            precision=self._settings.precision,
            unit=law.privacy.unit,
            key=key,
            data_after_s=window_s[0],
            data_until_s=window_s[1],
        )
        update = train_privately(
            work,
            model,
            privacy=law.privacy,
            ledger=self.ledger,
            checkpoints=self.checkpoints,
            now_s=self._clock(),
            unsafe_no_noise=self._unsafe_no_noise,
        )
        self.updates.put(update, data_until_s=window_s[1])
        return update

    def _oldest_s(self, law: SitePolicy) -> float:
        return self._clock() - law.collection.retention_days * _DAY_S

    def open_window(self, law: SitePolicy) -> tuple[float, float]:
        """Times of the records that no finished update has used and the law still allows.

        Of their collection; with `training.records = "committed"` of their commits.
        """
        return max(self.updates.data_until_s(), self._oldest_s(law)), self._clock()

    def commits_from_s(self, law: SitePolicy) -> float:
        """From when on records were collected that some round may still have once they are committed."""
        return self._oldest_s(law) if self._settings.records == "committed" else self.open_window(law)[0]

    def _records(self, law: SitePolicy, window_s: tuple[float, float]) -> tuple[list[Trajectory], int]:
        """The records of a window, by what each says of itself, and how many wait for their commit."""
        after_s, until_s = window_s
        if self._settings.records == "all":
            return list(self._store.read(after_s=after_s, until_s=until_s)), 0
        known = list(self._store.read(after_s=self._oldest_s(law), until_s=until_s))
        return [t for t in known if after_s < t.committed_at_s <= until_s], sum(not t.committed_at_s for t in known)

    def dataset(
        self,
        training: Training,
        law: SitePolicy,
        redactor: Redactor,
        *,
        adapter_version: str,
        window_s: tuple[float, float],
        key: bytes | None = None,
    ) -> Dataset:
        """This site's units for a round on a version, under the redaction in force now.

        Args:
            window_s: times (after, until], of collections or commits.
            key: of the round, for what is drawn from a user's examples.
        """
        objective, hyperparameters = objective_of(training.objective, training.hyperparameters)
        records, uncommitted = self._records(law, window_s)
        allowed = [t for t in records if not redactor.redact(t)]
        settings = DatasetSettings(
            kind=objective.kind,
            unit=law.privacy.unit,
            examples_per_user=law.privacy.examples_per_user,
            group_size=int(hyperparameters.get(GROUP_SIZE, 0)),
            current_version=_number(adapter_version),
            base_digest=self._folder.digest,
        )
        dataset = build_dataset(
            allowed,
            settings,
            encode_answer=lambda text: tuple(self._tokenizer.encode_answer(text)),
            random=SecureRandom(key, stream=DATA_STREAM),
            vocabulary=self._folder.dimensions.vocabulary,
            longest_tokens=min(LONGEST_ANSWER_TOKENS, self._folder.dimensions.context_tokens),
        )
        if uncommitted:
            dataset = Dataset(dataset.units, {**dataset.left_out, "not committed": uncommitted})
        if not objective.off_policy:
            return dataset
        units = with_behaviour_logps(dataset.units)
        missing = len(dataset.units) - len(units)
        return Dataset(units, {**dataset.left_out, "no log-probabilities": missing} if missing else dataset.left_out)

    def _warn(self, plan: RoundPlan, dataset: Dataset) -> None:
        """What the site's own people should know; none of it is told to others."""
        found = imbalance(dataset)
        if found is not None:
            log_event(logger, "one-sided feedback", site=self._site, plan=plan.digest[:12], reason=found)
        if not dataset.units:
            reason = json.dumps(dict(dataset.left_out), sort_keys=True)
            log_event(logger, "no usable records", site=self._site, plan=plan.digest[:12], reason=reason)

    def _require_data(self, plan: RoundPlan, law: SitePolicy, dataset: Dataset) -> None:
        require_enough_units(
            len(dataset.units),
            min_samples=self._settings.min_samples,
            round_name=round_name(plan),
            plan_digest=plan.digest,
            privacy=law.privacy,
            ledger=self.ledger,
            random=SecureRandom(),
            now_s=self._clock(),
        )

    def _require_short_steps(self, plan: RoundPlan, adapter: Adapter) -> None:
        """Refuse a plan whose private steps take too long here, by a time measured on public text."""
        expected_s = plan.training.expected_batch * self.seconds_per_unit(adapter, plan.training.objective)
        if expected_s > self._settings.iteration_limit_s:
            raise PrivacyError(
                f"one private step would take about {expected_s / 60:.1f} minutes here, "
                f"iteration_limit_s is {self._settings.iteration_limit_s:g}; plan smaller batches or raise the limit",
                public="this site's machine is too slow for the plan's batches",
            )

    def expected_s(self, plan: RoundPlan, adapter: Adapter) -> float:
        """How long a plan's training takes here, measured on public text; waits for a training that is under way."""
        with self._one_at_a_time:
            units = plan.training.steps * plan.training.expected_batch
            return units * self.seconds_per_unit(adapter, plan.training.objective)

    def seconds_per_unit(self, adapter: Adapter, objective: str) -> float:
        """Of one unit's gradient, measured once on public text."""
        if objective not in self._seconds_per_unit:
            model = self.model()
            model.start(adapter, adapter.names("B"))
            self._seconds_per_unit[objective] = seconds_per_unit(
                model, objective, limit=PassLimit(), engine=self._settings.engine
            )
        return self._seconds_per_unit[objective]

    def _limit(self, model: LoraModel) -> PassLimit:
        chosen = self._settings.physical_batch
        if chosen != "auto":
            return PassLimit(rows=chosen)
        return pass_limit(
            free_bytes(model.device),
            self._folder.dimensions,
            value_bytes=_VALUE_BYTES[self._settings.precision],
            checkpointing=self._settings.gradient_checkpointing,
        )

    def model(self) -> LoraModel:
        """The training model, loaded once."""
        if self._model is None:
            if self._settings.device == "cuda" and not torch.cuda.is_available():
                raise ConfigError("training.device is cuda, but PyTorch finds no CUDA device")
            self._model = LoraModel(
                self._folder,
                self._lora.shape,
                device=self._settings.device,
                precision=self._settings.precision,
                checkpointing=self._settings.gradient_checkpointing,
            )
        return self._model

    def checks(self, adapter: Adapter, objective: str) -> list[Check]:
        """The self-test of private training on this site's model."""
        return self_test(
            self.model(),
            adapter,
            objective=objective,
            engine=self._settings.engine,
            tolerance=_TOLERANCE[self._settings.precision],
        )

    def _tested_model(self, adapter: Adapter, objective: str) -> LoraModel:
        """The model, once it has passed the self-test under these settings in this process."""
        model = self.model()
        subject = self._subject(objective)
        with _TESTING:
            if subject not in _PASSED:
                self._require_passed(adapter, objective)
                _PASSED.add(subject)
        return model

    def _require_passed(self, adapter: Adapter, objective: str) -> None:
        failed = [check for check in self.checks(adapter, objective) if not check.passed]
        if failed:
            worst = failed[0]
            raise PrivacyError(
                f"the self-test fails at {worst.name}: {worst.figure:.3g}, at most {worst.limit:.3g} is allowed; "
                "run headwater edge doctor --privacy",
                public="this site's self-test of private training fails",
            )

    def _subject(self, objective: str) -> str:
        """What a passed self-test speaks of, within this process."""
        settings = [
            self._settings.engine,
            self._settings.device,
            self._settings.precision,
            self._settings.gradient_checkpointing,
        ]
        return repr([self._folder.digest, self._lora.shape, objective, *settings])


def _number(version_id: str) -> int:
    found = re.fullmatch(r"v(\d{1,9})", version_id)
    return int(found[1]) if found else 0


def open_ledger(data_dir: Path, key: SigningKey) -> Ledger:
    """The site's ledger, checked against the updates that name its entries.

    Raises:
        TrustError: an entry was changed, cut off or deleted.
    """
    ledger = Ledger(data_dir / "ledger.sqlite", key)
    entries = FinishedUpdates(data_dir / "updates").ledger_entries() - {NOT_CHARGED}
    if not entries <= ledger.entries():
        ledger.close()
        raise TrustError("a finished update names a charge the privacy ledger does not have; training stays off")
    return ledger


def _ledger_or_why_not(data_dir: Path, key: SigningKey) -> Ledger | TrustError:
    """With a ledger that cannot be believed a node serves, and does not train."""
    try:
        return open_ledger(data_dir, key)
    except (TrustError, TransportError) as error:
        log_event(logger, "training is off", reason=str(error))
        return TrustError(str(error), public=error.public)
