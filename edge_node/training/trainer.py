"""One round of private training at one site, top to bottom.

The charge is written before the first step. Nothing computed from the site's
data leaves this module but the finished `PrivateUpdate`: no loss, no count, no
norm. A site with little or no data trains on noise rather than say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from common.accounting import PrivateSteps, noise_multiplier_for
from common.adapter import Adapter
from common.errors import PrivacyError
from common.plan import RoundPlan, Training
from common.update import NOT_CHARGED, PrivateUpdate
from edge_node.policy import SitePolicy
from edge_node.training import OBJECTIVES
from edge_node.training.dataset import PreferencePair, collate
from edge_node.training.ledger import Charge, Ledger
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.private_step import ClippedSum
from edge_node.training.unit_gradients import UnitGradients

OPTIMIZERS: dict[str, Callable[[list[Parameter], float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.99)),
}
"""Optimizers of the noisy mean gradient; SGD keeps its scale, so noise averages out over steps and sites."""


@dataclass(frozen=True)
class Round:
    """What one round of training works on.

    Attributes:
        pairs: this site's units.
        physical_batch: pairs per forward pass; memory only, never the mechanism.
    """

    plan: RoundPlan
    adapter: Adapter
    pairs: list[PreferencePair]
    pad_id: int
    physical_batch: int


def train_privately(
    work: Round, model: LoraModel, *, law: SitePolicy, ledger: Ledger, unsafe_no_noise: bool = False
) -> PrivateUpdate:
    """Charge, train, and return the clipped change of the plan's LoRA factor.

    Raises:
        PrivacyError: the objective or optimizer is unknown, the budget is out, or a guarantee would break.
        TransportError: the ledger could not be written.
    """
    plan = work.plan
    for name, known in ((plan.training.objective, OBJECTIVES), (plan.training.optimizer, OPTIMIZERS)):
        if name not in known:
            raise PrivacyError(
                f"the plan asks for {name!r}; this site knows {', '.join(sorted(known))}",
                public="the plan asks for an objective or optimizer this site does not know",
            )
    if unsafe_no_noise:
        sigma, entry = 0.0, NOT_CHARGED
    else:
        sigma = _noise(plan, law, ledger)
        event = PrivateSteps(sigma, plan.training.sampling_rate, plan.training.steps)
        entry = ledger.charge(
            Charge("training", f"{plan.federation}/{plan.round}", plan.digest, event),
            epsilon_total=law.privacy.epsilon_total,
            delta=law.privacy.delta,
        )
    names = work.adapter.names(plan.lora_phase)
    model.start(work.adapter, names)
    engine = UnitGradients(model.peft_model)
    _run_steps(work, model, engine, sigma=sigma)
    shapes = {name: work.adapter.tensors[name].shape for name in names}
    return PrivateUpdate(plan.digest, shapes, _clipped_change(work.adapter, model, names, plan.clip_norm), entry)


def _noise(plan: RoundPlan, law: SitePolicy, ledger: Ledger) -> float:
    """σ of the first charge where there is one, else solved from the plan and the policy."""
    earlier = ledger.charges()
    return earlier[0].event.noise_multiplier if earlier else planned_noise(plan, law)


def planned_noise(plan: RoundPlan, law: SitePolicy) -> float:
    """σ that spends the site's whole budget in exactly the planned rounds."""
    return noise_multiplier_for(
        target_epsilon=law.privacy.epsilon_total,
        delta=law.privacy.delta,
        sampling_rate=plan.training.sampling_rate,
        steps=plan.training.steps * plan.planned_rounds,
    )


def _run_steps(work: Round, model: LoraModel, engine: UnitGradients, *, sigma: float) -> None:
    settings = work.plan.training
    reference_U2 = _reference_logps(work, model)
    parameters = list(engine.parameters.values())
    optimizer = OPTIMIZERS[settings.optimizer](parameters, settings.learning_rate)
    random = SecureRandom()
    for _ in range(settings.steps):
        chosen = np.flatnonzero(random.bernoulli(settings.sampling_rate, len(work.pairs)))
        total = ClippedSum(engine.dimension, clip_norm=settings.unit_clip_norm, noise_multiplier=sigma)
        for start in range(0, len(chosen), work.physical_batch):
            part = chosen[start : start + work.physical_batch]
            total.add(_pair_gradients(work, model, engine, part, reference_U2[part], settings))
        released_D = total.release(random) if sigma > 0 else total.unsafe_release_without_noise()
        mean_D = (released_D / settings.expected_batch).to(model.device, torch.float32)
        for parameter, gradient in zip(parameters, mean_D.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()


def _pair_gradients(
    work: Round,
    model: LoraModel,
    engine: UnitGradients,
    part: np.ndarray,
    reference_U2: Tensor,
    settings: Training,
) -> Tensor:
    """Per-pair gradients [U, D] of the objective."""
    batch = collate([work.pairs[i] for i in part], pad_id=work.pad_id)
    rows = torch.arange(batch.pairs, device=model.device).repeat(2)
    with engine.collect(rows, batch.pairs) as gradients_UD:
        chosen_U, rejected_U = model.completion_logps(batch).chunk(2)
        OBJECTIVES[settings.objective](
            chosen_U, rejected_U, reference_U2[:, 0], reference_U2[:, 1], beta=settings.beta
        ).sum().backward()
    return gradients_UD


@torch.no_grad()
def _reference_logps(work: Round, model: LoraModel) -> Tensor:
    """Log-probs of every pair under the round's start, [U, 2]: a function of each record and public weights."""
    parts = [torch.zeros(0, 2, device=model.device)]
    for start in range(0, len(work.pairs), work.physical_batch):
        batch = collate(work.pairs[start : start + work.physical_batch], pad_id=work.pad_id)
        parts.append(model.completion_logps(batch).view(2, -1).T)
    return torch.cat(parts)


def _clipped_change(start: Adapter, model: LoraModel, names: tuple[str, ...], clip_norm: float) -> np.ndarray:
    """What training changed, flat, scaled down to the plan's clip where it is longer (post-processing)."""
    after_D = np.concatenate([tensor.reshape(-1) for tensor in model.tensors(names).values()])
    change_D = after_D - start.flatten(names)
    norm = float(np.linalg.norm(change_D.astype(np.float64)))
    return change_D * np.float32(min(1.0, clip_norm / norm)) if norm > 0 else change_D
