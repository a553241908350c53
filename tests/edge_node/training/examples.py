"""Random examples of every kind, and the losses of an objective on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from edge_node.training.batch import Term, collate, completions
from edge_node.training.lora_model import LoraModel
from edge_node.training.objectives import objective_of
from edge_node.training.trainer import Losses
from edge_node.training.units import Answer, Example, Unit


def random_answer(generator: torch.Generator, prompt: tuple[int, ...] | None = None) -> Answer:
    """Random tokens; some of the completion was not written by the model."""
    prompt = prompt or random_ids(generator, 4, 12)
    completion = random_ids(generator, 3, 20)
    written = torch.rand(len(completion), generator=generator) < 0.8
    written[-1] = True
    return Answer(
        prompt,
        completion,
        tuple(written.tolist()),
        behaviour_logps=tuple((-2 + 0.3 * torch.randn(len(completion), generator=generator)).tolist()),
        reward=float(torch.randn(1, generator=generator)),
    )


def random_ids(generator: torch.Generator, low: int, high: int) -> tuple[int, ...]:
    length = int(torch.randint(low, high, (1,), generator=generator))
    return tuple(torch.randint(6, 280, (length,), generator=generator).tolist())


def random_examples(objective: str, count: int, *, seed: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    answers = objective_of(objective, {})[0].answers
    examples = []
    for _ in range(count):
        prompt = random_ids(generator, 4, 12)
        examples.append(tuple(random_answer(generator, prompt) for _ in range(answers)))
    return examples


def random_units(objective: str, count: int, *, seed: int, examples_per_unit: int = 1) -> list[Unit]:
    examples = random_examples(objective, count * examples_per_unit, seed=seed)
    return [Unit(tuple(examples[i * examples_per_unit : (i + 1) * examples_per_unit])) for i in range(count)]


def terms_of(units: Sequence[Unit], *, seed: int = 0) -> list[Term]:
    """Terms with made-up log-probabilities under the start."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Term(
            example,
            index,
            1.0 / len(unit.examples),
            tuple(-2 + 0.3 * torch.randn(len(a.completion_ids), generator=generator) for a in example),
        )
        for index, unit in enumerate(units)
        for example in unit.examples
    ]


@torch.no_grad()
def near_policy(model: LoraModel, units: Sequence[Unit], *, seed: int = 0) -> list[Unit]:
    """The units with behaviour log-probabilities close to the model's own, so that nothing is clipped away."""
    generator = torch.Generator().manual_seed(seed)

    def recorded(answer: Answer) -> Answer:
        batch = collate([Term((answer,))], pad_id=0)
        logps_K = completions(model.token_logps(batch).logps_BK, [Term((answer,))])[0][0]
        return replace(
            answer, behaviour_logps=tuple((logps_K + 0.01 * torch.randn(len(logps_K), generator=generator)).tolist())
        )

    return [Unit(tuple(tuple(map(recorded, example)) for example in unit.examples)) for unit in units]


def losses_of(model: LoraModel, objective: str, **hyperparameters: float) -> Losses:
    method, values = objective_of(objective, hyperparameters)
    return Losses(model, method, values, pad_id=0)


def one_by_one(model: LoraModel, losses: Losses, units: Sequence[Unit], *, seed: int = 0) -> Tensor:
    """Gradients [U, D] by plain autograd: one unit, and in it one example, at a time."""
    parameters = [p for _, p in sorted(model.peft_model.named_parameters()) if p.requires_grad]
    terms = terms_of(units, seed=seed)
    rows = []
    for index in range(len(units)):
        own = [losses([term]) * term.weight for term in terms if term.unit == index]
        found = torch.autograd.grad(torch.cat(own).sum(), parameters)
        rows.append(torch.cat([g.reshape(-1) for g in found]))
    return torch.stack(rows)
