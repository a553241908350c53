"""Does private training keep its promises on this model, with these libraries, on this machine?

Each check runs the code that trains, on public synthetic examples, and gives a
figure with its limit. Training refuses to start where one fails: a pair of library
versions that silently breaks per-unit gradients looks like ordinary training and
costs weeks, or the guarantee.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.adapter import PHASES, Adapter
from edge_node.training.batch import PassLimit, Term, collate, completions
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.objectives import Objective, objective_of
from edge_node.training.trainer import ENGINES, Losses, noisy_sum
from edge_node.training.unit_gradients import FlatGradients, GradientEngine, OneUnitGradients
from edge_node.training.units import Answer, Example

_UNITS, _PROMPT, _COMPLETION = 4, 6, 8
_CLIP = 0.05
_NOISE_DEVIATIONS = 6.0
_TINY = 1e-12
_DRAW = (
    "import random, numpy, torch\n"
    "random.seed(0); numpy.random.seed(0); torch.manual_seed(0)\n"
    "from edge_node.training.noise import SecureRandom\n"
    "r = SecureRandom(); print(r.normal(4).tolist(), r.bernoulli(0.5, 64).tolist())\n"
)


@dataclass(frozen=True)
class Check:
    """One figure and the limit it must keep."""

    name: str
    figure: float
    limit: float
    meaning: str

    @property
    def passed(self) -> bool:
        return bool(np.isfinite(self.figure)) and self.figure <= self.limit


def self_test(
    model: LoraModel, adapter: Adapter, *, objective: str, engine: str = "flat", tolerance: float = 1e-5
) -> list[Check]:
    """Run every check, on both LoRA factors; `model` is left with `adapter` loaded.

    Args:
        engine: the one that trains here, a key of ENGINES.
        tolerance: relative, for comparisons of gradients; larger for a base of lower precision.
    """
    method, values = objective_of(objective, {})
    losses = Losses(model, method, values, pad_id=0)
    moved = _moved(adapter)
    worst: dict[str, Check] = {}
    for phase in PHASES:
        model.start(moved, moved.names(phase))
        terms = _terms(method, model)
        for check in _on_one_factor(model, ENGINES[engine], losses, terms, tolerance):
            if check.name not in worst or not check.figure <= worst[check.name].figure:
                worst[check.name] = check
    checks = [*worst.values(), _noise_is_secret(), _reload(model, adapter, moved, losses, terms, tolerance)]
    model.start(adapter, ())
    return checks


def _moved(adapter: Adapter) -> Adapter:
    """An adapter both of whose factors have gradients."""
    rng = np.random.default_rng(1)
    return Adapter(
        adapter.shape,
        {n: t + rng.normal(0, 0.02, t.shape).astype(np.float32) for n, t in adapter.tensors.items()},
    )


def _on_one_factor(
    model: LoraModel,
    kind: type[FlatGradients] | type[OneUnitGradients],
    losses: Losses,
    terms: Sequence[Term],
    tolerance: float,
) -> list[Check]:
    tested = kind(model.peft_model, loss_scale=model.loss_scale)
    alone = OneUnitGradients(model.peft_model, limit=PassLimit(rows=1), loss_scale=model.loss_scale)
    single = [replace(term, unit=unit) for unit, term in enumerate(terms)]
    paired = [replace(term, unit=index // 2, weight=0.5) for index, term in enumerate(terms)]
    agree = [
        _gradients_agree(
            torch.cat(list(tested.gradients(chosen, units, losses))),
            torch.cat(list(alone.gradients(chosen, units, losses))),
            tolerance,
        )
        for chosen, units in ((single, len(terms)), (paired, len(terms) // 2))
    ]
    norms = [float(torch.linalg.vector_norm(g)) for g in tested.gradients(single, len(terms), losses)]
    return [
        max(agree, key=lambda check: check.figure),
        _parity(single, tested, losses, max(norms), tolerance),
        _sensitivity(single, tested, losses),
        _noise_level(tested, losses),
    ]


def _terms(objective: Objective, model: LoraModel) -> list[Term]:
    """Units of random tokens, each of another length, in the shape the objective takes."""
    rng, vocabulary = np.random.default_rng(0), model.peft_model.config.vocab_size

    def answer(index: int, length: int, prompt: tuple[int, ...]) -> Answer:
        tokens = tuple(rng.integers(0, vocabulary, length).tolist())
        return Answer(prompt, tokens, (True,) * length, reward=1.0 - 2.0 * (index % 2))

    terms = []
    for unit in range(_UNITS):
        prompt = tuple(rng.integers(0, vocabulary, _PROMPT + unit).tolist())
        example: Example = tuple(
            answer(index, _COMPLETION + unit + index, prompt) for index in range(objective.answers)
        )
        terms.append(Term(example, unit))
    return [_as_served(term, model) for term in terms]


@torch.no_grad()
def _as_served(term: Term, model: LoraModel) -> Term:
    """The term as if the model had served it: recorded and start log-probabilities are the model's own."""
    batch = collate([term], pad_id=0)
    (logps,) = completions(model.token_logps(batch).logps_BK.cpu(), [term])
    example = tuple(
        replace(answer, behaviour_logps=tuple(own.tolist())) for answer, own in zip(term.example, logps, strict=True)
    )
    return replace(term, example=example, start_logps=logps)


def _gradients_agree(together_UD: Tensor, one_by_one_UD: Tensor, tolerance: float) -> Check:
    norms = sorted(torch.linalg.vector_norm(together_UD, dim=1).tolist())
    alone = sorted(torch.linalg.vector_norm(one_by_one_UD, dim=1).tolist())  # the engines may order units differently
    sums = (together_UD.sum(0) - one_by_one_UD.sum(0)).abs().max() / one_by_one_UD.abs().max()
    worst = max(float(sums), *(abs(a - b) / max(b, _TINY) for a, b in zip(norms, alone, strict=True)))
    return Check(
        "per-unit gradients",
        worst,
        tolerance,
        "largest relative difference between gradients of all units at once and of one unit at a time",
    )


def _parity(
    terms: Sequence[Term],
    engine: GradientEngine,
    losses: Callable[[Sequence[Term]], Tensor],
    largest_norm: float,
    limit: float,
) -> Check:
    units = [[term] for term in terms]
    clip = 2.0 * largest_norm
    ours_D = noisy_sum(units, engine, losses, clip_norm=clip, sigma=0.0, random=SecureRandom())
    for p in engine.parameters.values():
        p.grad = None
    losses(terms).sum().backward()
    plain_D = torch.cat([p.grad.reshape(-1) for p in engine.parameters.values() if p.grad is not None]).cpu().double()
    figure = float((ours_D - plain_D).abs().max() / plain_D.abs().max())
    for p in engine.parameters.values():
        p.grad = None
    return Check("noise off = plain SGD", figure, limit, "largest relative difference of one step's direction")


def _sensitivity(terms: Sequence[Term], engine: GradientEngine, losses: Losses) -> Check:
    """One unit more changes the sum of a real step by at most C, also where its loss is made huge, tiny or infinite."""

    def clipped(chosen: Sequence[Term], scale_last: float) -> Tensor:
        def scaled(part: Sequence[Term]) -> Tensor:
            factors = [scale_last if term.example == terms[-1].example else 1.0 for term in part]
            loss_E = losses(part)
            return loss_E * torch.tensor(factors, device=loss_E.device)

        units = [[term] for term in chosen]
        return noisy_sum(units, engine, scaled, clip_norm=_CLIP, sigma=0.0, random=SecureRandom())

    without = clipped(terms[:-1], 1.0)
    changes = [float(torch.linalg.vector_norm(clipped(terms, scale) - without)) for scale in (1.0, 1e9, 1e-9, 1e38)]
    return Check(
        "sensitivity",
        max(changes) / _CLIP,
        1.0,
        "largest change of a step's sum by one unit more, in clips",
    )


def _noise_level(engine: GradientEngine, losses: Losses) -> Check:
    """Of a real step on an empty batch."""
    sigma = 1.3
    released = noisy_sum([], engine, losses, clip_norm=_CLIP, sigma=sigma, random=SecureRandom()).numpy()
    return Check(
        "noise of an empty batch",
        abs(float(released.std()) / (sigma * _CLIP) - 1.0),
        _NOISE_DEVIATIONS / (2 * len(released)) ** 0.5,
        "relative difference of its standard deviation from the one that is accounted",
    )


def _noise_is_secret() -> Check:
    runs = {
        subprocess.run([sys.executable, "-c", _DRAW], capture_output=True, text=True, check=True).stdout  # noqa: S603 - a constant text
        for _ in range(2)
    }
    return Check(
        "equal noise under one seed", float(2 - len(runs)), 0.0, "two processes with all seeds equal drew the same"
    )


@torch.no_grad()
def _reload(
    model: LoraModel, adapter: Adapter, moved: Adapter, losses: Losses, terms: Sequence[Term], limit: float
) -> Check:
    """Save as a PEFT folder, load it with PEFT, and compare losses: a silently corrupted adapter shows here."""
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    model.start(moved, ())
    before_E = losses(terms)
    with tempfile.TemporaryDirectory() as folder:
        moved.write_peft_folder(Path(folder), base_model="base")
        weights = load_peft_weights(folder, device=str(model.device))
    model.start(adapter, ())
    set_peft_model_state_dict(model.peft_model, weights)
    figure = float(((losses(terms) - before_E).abs() / before_E.abs().clamp(min=1e-6)).max())
    return Check(
        "save and reload", figure, limit, "largest relative change of a loss after saving and loading with PEFT"
    )
