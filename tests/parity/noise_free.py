"""The private step with its noise off and nothing clipped: what must equal an ordinary trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training.batch import Term, collate, completions
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.objectives import objective_of
from edge_node.training.trainer import OPTIMIZERS, Losses, noisy_sum
from edge_node.training.unit_gradients import FlatGradients
from edge_node.training.units import Example
from tests.conftest import SHAPE

_PAD_ID = 0
_BEYOND_EVERY_UNIT = 2.0**10
"""Clip no unit reaches; its lattice rounds a step by less than 1e-7 at the rates used here."""


class NoiseFreeTraining:
    """SGD with an objective on an adapter, both LoRA factors trainable; one example is one unit."""

    def __init__(
        self, model: ModelFolder, adapter: Adapter, objective: str, hyperparameters: dict[str, float], *, rate: float
    ) -> None:
        self._names = tuple(adapter.tensors)
        self._start, self._model = LoraModel(model, SHAPE), LoraModel(model, SHAPE)
        self._start.start(adapter, ())
        self._model.start(adapter, self._names)
        self._engine = FlatGradients(self._model.peft_model)
        self._losses = Losses(self._model, *objective_of(objective, hyperparameters), _PAD_ID)
        self._optimizer = OPTIMIZERS["sgd"](list(self._engine.parameters.values()), rate)

    def step(self, examples: Sequence[Example], start_logps: Sequence[tuple[Tensor, ...]] | None = None) -> None:
        """One step on a batch; the start's log-probabilities are computed where none are given."""
        starts = start_logps if start_logps is not None else self._logps_at_start(examples)
        released_D = noisy_sum(
            [[Term(example, start_logps=logps)] for example, logps in zip(examples, starts, strict=True)],
            self._engine,
            self._losses,
            clip_norm=_BEYOND_EVERY_UNIT,
            sigma=0.0,
            random=SecureRandom(),
        )
        mean_D = (released_D / len(examples)).float()
        parameters = self._engine.parameters.values()
        for p, gradient in zip(parameters, mean_D.split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.view_as(p)
        self._optimizer.step()

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return dict(self._model.tensors(self._names))

    @torch.no_grad()
    def _logps_at_start(self, examples: Sequence[Example]) -> list[tuple[Tensor, ...]]:
        terms = [Term(example) for example in examples]
        batch = collate(terms, pad_id=_PAD_ID)
        return completions(self._start.token_logps(batch).logps_BK, terms)
