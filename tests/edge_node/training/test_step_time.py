"""Time of one unit: the engine that trains, on texts nobody wrote."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training import step_time
from edge_node.training.batch import PassLimit, Term
from edge_node.training.lora_model import LoraModel
from edge_node.training.objectives import OBJECTIVES
from edge_node.training.step_time import seconds_per_unit, synthetic_terms
from edge_node.training.unit_gradients import FlatGradients
from tests.conftest import SHAPE


@pytest.fixture(scope="module")
def lora(model: ModelFolder, start: Adapter) -> LoraModel:
    lora = LoraModel(model, SHAPE)
    lora.start(start, start.names("B"))
    return lora


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_is_measured_in_the_shape_it_takes(lora: LoraModel, objective: str) -> None:
    method = OBJECTIVES[objective]
    terms = synthetic_terms(method, 3, prompt_tokens=5, completion_tokens=7)
    assert [term.unit for term in terms] == [0, 1, 2]
    assert {len(term.example) for term in terms} == {method.answers}
    assert {answer.length for term in terms for answer in term.example} == {12}
    assert 0 < seconds_per_unit(lora, objective, limit=PassLimit(), prompt_tokens=5, completion_tokens=7) < 10


def test_the_faster_of_two_passes_is_shared_among_its_units(lora: LoraModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass also warms up."""
    ticks = iter([0.0, 60.0, 100.0, 104.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    passes: list[int] = []
    real = FlatGradients.gradients

    def counted(self: FlatGradients, terms: list[Term], units: int, losses: object) -> Iterator[object]:
        passes.append(units)
        yield from real(self, terms, units, losses)  # type: ignore[arg-type]

    monkeypatch.setattr(FlatGradients, "gradients", counted)
    found = seconds_per_unit(lora, "dpo", limit=PassLimit(), prompt_tokens=2, completion_tokens=2)
    assert passes == [step_time._UNITS] * 2
    assert found == 4.0 / step_time._UNITS


def test_longer_texts_take_longer(lora: LoraModel) -> None:
    short, long = (
        min(
            seconds_per_unit(lora, "rft", limit=PassLimit(), prompt_tokens=2, completion_tokens=count) for _ in range(2)
        )
        for count in (2, 200)
    )
    assert long > 2 * short


def test_measuring_leaves_the_weights_as_they_were(lora: LoraModel, start: Adapter) -> None:
    seconds_per_unit(lora, "dpo", limit=PassLimit(rows=2), prompt_tokens=2, completion_tokens=3)
    for name, tensor in lora.tensors(tuple(start.tensors)).items():
        assert (tensor == start.tensors[name]).all()
