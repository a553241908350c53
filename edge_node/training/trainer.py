"""One round of private training at one site, top to bottom.

The reservation is written before the first step. Nothing computed from the site's
data leaves this module but the finished `PrivateUpdate`: no loss, no count, no
norm. A site with little data trains mostly on noise rather than say so.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from common.accounting import PrivateSteps, noise_multiplier_for
from common.adapter import Adapter
from common.errors import PrivacyError
from common.identity import sha256_hex
from common.plan import RoundPlan, Training
from common.update import NOT_CHARGED, PrivateUpdate
from edge_node.policy import Privacy
from edge_node.training.batch import PassLimit, Term, collate, completions
from edge_node.training.checkpoints import EVERY_STEPS, Checkpoint, Checkpoints, TrainingRecord
from edge_node.training.ledger import Ledger, charged_before
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import KEY_BYTES, SecureRandom
from edge_node.training.objectives import Objective, objective_of
from edge_node.training.objectives.rows import Rows
from edge_node.training.off_policy import is_trusted
from edge_node.training.private_step import ClippedSum
from edge_node.training.readiness import READINESS, READINESS_EVENT
from edge_node.training.unit_gradients import FlatGradients, GradientEngine, OneUnitGradients, with_less_memory
from edge_node.training.units import Unit

OPTIMIZERS: dict[str, Callable[[list[Parameter], float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, fused=True),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.99), fused=True),
}
"""Optimizers of the noisy mean gradient; SGD keeps its scale, so noise averages out over steps and sites."""

ENGINES: dict[str, type[FlatGradients] | type[OneUnitGradients]] = {
    "flat": FlatGradients,
    "one-unit": OneUnitGradients,
}

TRAINING = "training"
_SAMPLING_STREAM = 0
"""Of a round's key; step k draws its noise from stream k, and what is drawn for the data has its own."""

DATA_STREAM, _DROPOUT_STREAMS = 1 << 32, 1 << 33

LARGEST_SHARED_WEIGHT = 10.0
"""Of the adapter, public: far beyond it rounding is amplified until units that share a pass move each other by more
than is kept free of the clip. So beyond it each unit has passes of its own."""

_UNITS_AT_ONCE, _VALUES_AT_ONCE = 256, 1 << 26
"""Units whose gradients are held together, and the values of all of them: 256 MiB."""

_LIBRARIES = ("headwater", "torch", "transformers", "peft", "opacus")


@dataclass(frozen=True)
class Round:
    """What one round of training works on.

    Attributes:
        limit: of one forward pass; memory only, never the mechanism.
        key: what sampling and noise are drawn from; kept until the update is finished. None for fresh draws.
        data_after_s, data_until_s: collection times the units come from.
    """

    plan: RoundPlan
    adapter: Adapter
    units: Sequence[Unit]
    pad_id: int
    limit: PassLimit = dataclasses.field(default_factory=PassLimit)
    engine: str = "flat"
    precision: str = "float32"
    unit: str = "trajectory"
    key: bytes | None = None
    data_after_s: float = 0.0
    data_until_s: float = 0.0


def train_privately(
    work: Round,
    model: LoraModel,
    *,
    privacy: Privacy,
    ledger: Ledger,
    checkpoints: Checkpoints,
    now_s: float,
    unsafe_no_noise: bool = False,
) -> PrivateUpdate:
    """Reserve, train, and return the clipped change of the plan's LoRA factor.

    The ledger's budget must be open for this plan (`open_budget`).

    Raises:
        PrivacyError: the objective or optimizer is unknown, the budget is out, or a guarantee would break.
        TransportError: the ledger or a checkpoint could not be written.
    """
    plan = work.plan
    objective, hyperparameters = check_training(plan.training)
    names = work.adapter.names(plan.lora_phase)
    values = hyperparameters.get("value_weight", 0.0) > 0
    model.start(work.adapter, names, dropout=plan.training.lora_dropout, value_head=values)
    engine = ENGINES[work.engine](model.peft_model, limit=work.limit, loss_scale=model.loss_scale)
    paid = _Paid(0.0, NOT_CHARGED, None) if unsafe_no_noise else _pay(plan, privacy, ledger, checkpoints, now_s)
    losses = Losses(model, objective, hyperparameters, work.pad_id)
    _run_steps(work, model, engine, losses, paid, checkpoints)
    shapes = {name: work.adapter.tensors[name].shape for name in names}
    change_D = _clipped_change(work.adapter, model, names, plan.clip_norm)
    return PrivateUpdate(plan.digest, shapes, change_D, paid.entry)


def check_training(training: Training) -> tuple[Objective, dict[str, float]]:
    """The objective and its hyper-parameters; raises PrivacyError for what this site does not know."""
    if training.optimizer not in OPTIMIZERS:
        raise PrivacyError(
            f"the plan asks for optimizer {training.optimizer!r}; this site knows {', '.join(sorted(OPTIMIZERS))}",
            public="the plan asks for an optimizer this site does not know",
        )
    return objective_of(training.objective, training.hyperparameters)


@dataclass(frozen=True)
class _Paid:
    """The reservation training runs under, and where an earlier process stopped under it."""

    sigma: float
    entry: str
    checkpoint: Checkpoint | None


def _pay(plan: RoundPlan, privacy: Privacy, ledger: Ledger, checkpoints: Checkpoints, now_s: float) -> _Paid:
    """Reserve this round, or go on under the reservation of an earlier process with the draws it had."""
    mechanism = ledger.mechanisms()[TRAINING]
    earlier = ledger.reservation(TRAINING, round_name(plan))
    if earlier is not None:
        require_its_own_draws(plan, ledger, checkpoints)
        checkpoint = checkpoints.latest(plan.digest, ledger_entry=earlier.entry)
        return _Paid(mechanism.noise_multiplier, earlier.entry, checkpoint)
    entry = ledger.reserve(
        TRAINING,
        round_name(plan),
        plan.digest,
        epsilon_total=privacy.epsilon_total,
        delta=privacy.delta,
        now_s=now_s,
    )
    return _Paid(mechanism.noise_multiplier, entry, None)


def require_its_own_draws(plan: RoundPlan, ledger: Ledger, checkpoints: Checkpoints) -> None:
    """A round that was reserved goes on only for the same plan, unfinished, and with the key it was begun with.

    Raises:
        PrivacyError: it would need new draws under an old charge.
    """
    earlier = ledger.reservation(TRAINING, round_name(plan))
    if earlier is None:
        return
    if earlier.outcome is not None or earlier.plan_digest != plan.digest or not checkpoints.has_key(plan.digest):
        raise charged_before()


def round_name(plan: RoundPlan) -> str:
    """What the ledger charges once, whatever plans name it."""
    return f"{plan.federation}/{plan.round}"


def open_budget(
    plan: RoundPlan, privacy: Privacy, ledger: Ledger, *, counted: bool, now_s: float
) -> Mapping[str, PrivateSteps]:
    """The ledger's mechanisms: as fixed by its first plan, else for this one.

    Args:
        counted: whether each round also counts the site's units (`readiness`).
    """
    fixed = ledger.mechanisms()
    if fixed:
        sigma = fixed[TRAINING].noise_multiplier
    else:
        sigma = planned_noise(
            plan.training,
            rounds=plan.planned_rounds,
            epsilon_total=privacy.epsilon_total,
            delta=privacy.delta,
            counted=counted,
        )
    wanted = {TRAINING: PrivateSteps(sigma, plan.training.sampling_rate, plan.training.steps)}
    if counted:
        wanted[READINESS] = READINESS_EVENT
    ledger.open_budget(wanted, now_s=now_s, unit=privacy.unit)
    return wanted


def planned_noise(
    training: Training, *, rounds: int, epsilon_total: float, delta: float, counted: bool = True
) -> float:
    """σ that spends a whole budget in exactly this many rounds, each with its count of the data."""
    count = READINESS_EVENT
    return noise_multiplier_for(
        target_epsilon=epsilon_total,
        delta=delta,
        sampling_rate=training.sampling_rate,
        steps=training.steps * rounds,
        besides=((count.noise_multiplier, count.sampling_rate, count.steps * rounds),) if counted else (),
    )


def _run_steps(
    work: Round, model: LoraModel, engine: GradientEngine, losses: Losses, paid: _Paid, checkpoints: Checkpoints
) -> None:
    settings = work.plan.training
    key = _draws_key(work)
    sampling = SecureRandom(key, stream=_SAMPLING_STREAM)
    first = paid.checkpoint.step if paid.checkpoint else 0
    batches = [
        np.flatnonzero(sampling.bernoulli(settings.sampling_rate, len(work.units))) for _ in range(settings.steps)
    ][first:]
    terms = _terms(work, model, losses, sorted(set(np.concatenate(batches).tolist())) if batches else [])
    optimizer = OPTIMIZERS[settings.optimizer](list(engine.parameters.values()), settings.learning_rate)
    alone = OneUnitGradients(model.peft_model, limit=work.limit, loss_scale=model.loss_scale)
    if paid.checkpoint:
        _restore(paid.checkpoint, engine.parameters, optimizer)
    for step, chosen in enumerate(batches, start=first + 1):
        model.dropout.random = SecureRandom(key, stream=_DROPOUT_STREAMS + step)
        released_D = noisy_sum(
            [terms[unit] for unit in chosen.tolist()],
            engine if model.largest_weight <= LARGEST_SHARED_WEIGHT else alone,
            losses,
            clip_norm=settings.unit_clip_norm,
            sigma=paid.sigma,
            random=SecureRandom(key, stream=step),
        )
        mean_D = (released_D / settings.expected_batch).to(model.device, torch.float32)
        sizes = [p.numel() for p in engine.parameters.values()]
        for parameter, gradient in zip(engine.parameters.values(), mean_D.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
        if step % EVERY_STEPS == 0 and step < settings.steps:
            checkpoints.save(Checkpoint(step, _record(work, paid), _state(engine.parameters, optimizer)))


def _draws_key(work: Round) -> bytes:
    """The round's key bound to its data: equal records repeat their draws, others never meet the same noise.

    Two releases with one noise would differ by the bare gradients; a backup from the middle of a round could do that.
    """
    data = sha256_hex(repr(tuple(work.units)).encode()).encode()
    return hmac.digest(work.key or os.urandom(KEY_BYTES), data, "sha256")


def noisy_sum(
    units: Sequence[Sequence[Term]],
    engine: GradientEngine,
    losses: Callable[[Sequence[Term]], Tensor],
    *,
    clip_norm: float,
    sigma: float,
    random: SecureRandom,
) -> Tensor:
    """One step of the mechanism: clip each unit's gradient, sum, add noise; float64 [D].

    Args:
        units: the terms of each sampled unit.
        sigma: noise multiplier; 0 for runs that promise nothing.
    """
    dimension = sum(p.numel() for p in engine.parameters.values())
    total = ClippedSum(dimension, clip_norm=clip_norm, noise_multiplier=sigma)
    at_once = max(1, min(_UNITS_AT_ONCE, _VALUES_AT_ONCE // dimension))
    for start in range(0, len(units), at_once):
        group = units[start : start + at_once]
        placed = [dataclasses.replace(term, unit=unit) for unit, terms in enumerate(group) for term in terms]
        for gradients_UD in engine.gradients(placed, len(group), losses):
            total.add(gradients_UD)
    return total.release(random) if sigma > 0 else total.unsafe_release_without_noise()


@dataclass(frozen=True)
class Losses:
    """The objective's loss of each term, in one forward pass."""

    model: LoraModel
    objective: Objective
    hyperparameters: Mapping[str, float]
    pad_id: int

    def __call__(self, terms: Sequence[Term]) -> Tensor:
        batch = collate(terms, pad_id=self.pad_id)
        found = self.model.token_logps(batch)
        examples, answers = batch.examples, batch.answers_per_example

        def shaped(values_B: Tensor) -> Tensor:
            return values_B.to(self.model.device).view(examples, answers, *values_B.shape[1:])

        rows = Rows(
            logps_ERK=shaped(found.logps_BK),
            start_logps_ERK=shaped(batch.start_logps_BK),
            behaviour_logps_ERK=shaped(batch.behaviour_logps_BK),
            written_ERK=shaped(batch.written_BK),
            rewards_ER=shaped(batch.rewards_B),
            values_ERK=None if found.values_BK is None else shaped(found.values_BK),
        )
        return self.objective.losses(rows, **self.objective.of_loss(self.hyperparameters))


def _terms(work: Round, model: LoraModel, losses: Losses, sampled: list[int]) -> dict[int, list[Term]]:
    """The terms of every unit that some step has drawn, with log-probs under the round's start.

    Those are a function of each record and of public weights. For off-policy objectives an answer whose
    recorded log-probs cannot be believed keeps its place and weighs nothing: a rule on the record alone.
    """
    flat = [
        Term(example, unit, 1.0 / len(work.units[unit].examples))
        for unit in sampled
        for example in work.units[unit].examples
    ]
    if losses.objective.uses_start:
        flat = _with_start_logps(flat, work, model)
    if losses.objective.off_policy:
        flat = [
            term if is_trusted(term, start_digest=work.adapter.digest) else dataclasses.replace(term, weight=0.0)
            for term in flat
        ]
    terms: dict[int, list[Term]] = {unit: [] for unit in sampled}
    for term in flat:
        terms[term.unit].append(term)
    return terms


def _with_start_logps(terms: Sequence[Term], work: Round, model: LoraModel) -> list[Term]:
    ordered = sorted(terms, key=lambda term: term.longest)
    model.peft_model.eval()
    try:
        return with_less_memory(work.limit, lambda limit: _start_logps(ordered, work.pad_id, model, limit))[0]
    finally:
        model.peft_model.train()


@torch.no_grad()
def _start_logps(terms: Sequence[Term], pad_id: int, model: LoraModel, limit: PassLimit) -> list[Term]:
    found = []
    for part in limit.passes(terms):
        batch = collate(part, pad_id=pad_id)
        logps_BK = model.token_logps(batch).logps_BK.cpu()
        for term, logps in zip(part, completions(logps_BK, part), strict=True):
            found.append(dataclasses.replace(term, start_logps=logps))
    return found


def _record(work: Round, paid: _Paid) -> TrainingRecord:
    return TrainingRecord(
        plan=dataclasses.asdict(work.plan),
        plan_digest=work.plan.digest,
        ledger_entry=paid.entry,
        noise_multiplier=paid.sigma,
        unit=work.unit,
        data_after_s=work.data_after_s,
        data_until_s=work.data_until_s,
        precision=work.precision,
        libraries={name: version(name) for name in _LIBRARIES},
    )


def _state(parameters: Mapping[str, Parameter], optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Parameters and optimizer state by name: all of it made from released sums."""
    tensors = {name: p.detach().cpu().numpy().copy() for name, p in parameters.items()}
    for name, p in parameters.items():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).cpu().numpy().copy()
    return tensors


def _restore(checkpoint: Checkpoint, parameters: Mapping[str, Parameter], optimizer: torch.optim.Optimizer) -> None:
    for name, p in parameters.items():
        p.data.copy_(torch.from_numpy(checkpoint.tensors[name]))
        prefix = f"{name}/"
        state = {
            key.removeprefix(prefix): torch.from_numpy(value.copy()).to(p.device)
            for key, value in checkpoint.tensors.items()
            if key.startswith(prefix)
        }
        if state:
            optimizer.state[p] = state


def _clipped_change(start: Adapter, model: LoraModel, names: tuple[str, ...], clip_norm: float) -> np.ndarray:
    """What training changed, flat, scaled down to the plan's clip where it is longer (post-processing)."""
    after_D = np.concatenate([tensor.reshape(-1) for tensor in model.tensors(names).values()])
    change_D = after_D - start.flatten(names)
    norm = float(np.linalg.norm(change_D.astype(np.float64)))
    return change_D * np.float32(min(1.0, clip_norm / norm)) if norm > 0 else change_D
