"""Per-unit gradients against one-unit-at-a-time autograd, and against Opacus' hooks."""

from __future__ import annotations

import pytest
import torch
from opacus.grad_sample import GradSampleHooks
from torch import nn

from common.adapter import Adapter
from common.errors import PrivacyError
from common.inference.model_folder import ModelFolder
from edge_node.training.batch import PassLimit, Term
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.objectives import OBJECTIVES
from edge_node.training.trainer import noisy_sum
from edge_node.training.unit_gradients import FlatGradients, OneUnitGradients
from tests.conftest import SHAPE, changed
from tests.edge_node.training.examples import losses_of, near_policy, one_by_one, random_units, terms_of


def rows_in_any_order(found: torch.Tensor, expected: torch.Tensor, *, limit: float = 2e-5) -> None:
    """Every unit's gradient is there once, to a relative error; an engine may number the units as it likes."""
    nearest = torch.cdist(found.double(), expected.double()).argmin(1)
    assert sorted(nearest.tolist()) == list(range(len(expected)))
    difference = torch.linalg.vector_norm(found.double() - expected[nearest].double(), dim=1)
    assert (difference / torch.linalg.vector_norm(expected[nearest].double(), dim=1)).max() <= limit


def loaded(model: ModelFolder, adapter: Adapter, phase: str, **options: bool | str) -> LoraModel:
    lora = LoraModel(model, SHAPE, **options)  # type: ignore[arg-type]
    lora.start(adapter, adapter.names(phase))
    return lora


@pytest.fixture(scope="module")
def lora(model: ModelFolder, start: Adapter) -> LoraModel:
    return loaded(model, changed(start, seed=1), "A")


@pytest.fixture(scope="module")
def exact(model: ModelFolder, start: Adapter) -> LoraModel:
    """In float64, so that what is left of a difference is the engine's."""
    lora = loaded(model, changed(start, seed=1), "A")
    lora.peft_model.double()
    return lora


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("phase", ["A", "B"])
def test_both_engines_equal_autograd_one_unit_at_a_time(
    exact: LoraModel, start: Adapter, objective: str, phase: str
) -> None:
    adapter, lora = changed(start, seed=1), exact
    lora.start(adapter, adapter.names(phase))
    settings = {"threshold": -100.0} if objective == "rft" else {}
    units = near_policy(lora, random_units(objective, 5, seed=0))
    losses = losses_of(lora, objective, **settings)
    expected = one_by_one(lora, losses, units)
    assert expected.abs().max() > 1e-3
    for limit in (PassLimit(), PassLimit(rows=3), PassLimit(tokens=50)):
        for kind in (FlatGradients, OneUnitGradients):
            engine = kind(lora.peft_model, limit=limit)
            names = [n.replace(".default", "") for n in engine.parameters]
            assert names == list(adapter.names(phase))
            found = torch.cat(list(engine.gradients(terms_of(units), 5, losses)))
            rows_in_any_order(found, expected, limit=1e-6)


@pytest.mark.parametrize("limit", [PassLimit(), PassLimit(rows=5)])
def test_a_users_examples_share_one_gradient(lora: LoraModel, limit: PassLimit) -> None:
    units, losses = random_units("dpo", 4, seed=3, examples_per_unit=3), losses_of(lora, "dpo")
    units[1] = type(units[1])(units[1].examples[:1])
    expected = one_by_one(lora, losses, units)
    for kind in (FlatGradients, OneUnitGradients):
        found = torch.cat(list(kind(lora.peft_model, limit=limit).gradients(terms_of(units), 4, losses)))
        rows_in_any_order(found, expected)


def test_equal_to_opacus(lora: LoraModel) -> None:
    units, losses = random_units("dpo", 5, seed=0), losses_of(lora, "dpo")
    engine = FlatGradients(lora.peft_model)
    gradients = torch.cat(list(engine.gradients(terms_of(units), 5, losses)))
    hooks = GradSampleHooks(lora.peft_model, loss_reduction="sum")
    losses(terms_of(units)).sum().backward()
    rows = torch.cat([p.grad_sample.flatten(1) for p in engine.parameters.values()], dim=1)
    rows_in_any_order(gradients, rows)  # both answers of a pair stand in one row
    hooks.cleanup()
    lora.peft_model.zero_grad()


def test_a_value_head_is_part_of_the_clipped_vector(lora: LoraModel, start: Adapter) -> None:
    adapter = changed(start, seed=1)
    lora.start(adapter, adapter.names("A"), value_head=True)
    assert lora.value_head is not None
    nn.init.normal_(lora.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    units, losses = random_units("ppo", 5, seed=2), losses_of(lora, "ppo", value_weight=0.5)
    expected = one_by_one(lora, losses, units)
    engine = FlatGradients(lora.peft_model)
    assert "value_head.weight" in engine.parameters
    assert engine.dimension == sum(p.numel() for p in engine.parameters.values()) == expected.shape[1]
    assert expected[:, -lora.value_head.weight.numel() :].abs().max() > 1e-3
    rows_in_any_order(torch.cat(list(engine.gradients(terms_of(units), 5, losses))), expected)
    lora.start(adapter, adapter.names("A"))
    assert "value_head.weight" not in FlatGradients(lora.peft_model).parameters


def test_gradient_checkpointing_gives_the_same_gradients(model: ModelFolder, start: Adapter, lora: LoraModel) -> None:
    units = random_units("dpo", 3, seed=4)
    expected = one_by_one(lora, losses_of(lora, "dpo"), units)
    other = loaded(model, changed(start, seed=1), "A", checkpointing=True)
    assert other.peft_model.is_gradient_checkpointing
    with pytest.raises(PrivacyError, match="does not repeat"):
        other.start(changed(start, seed=1), (), dropout=0.1)
    engine = FlatGradients(other.peft_model)
    rows_in_any_order(torch.cat(list(engine.gradients(terms_of(units), 3, losses_of(other, "dpo")))), expected)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_base_of_lower_precision_gives_float32_gradients_close_to_the_exact_ones(
    model: ModelFolder, start: Adapter, lora: LoraModel, precision: str
) -> None:
    units = random_units("dpo", 3, seed=4)
    exact = one_by_one(lora, losses_of(lora, "dpo"), units).sum(0)
    other = loaded(model, changed(start, seed=1), "A", precision=precision)
    engine = FlatGradients(other.peft_model, loss_scale=other.loss_scale)
    found = torch.cat(list(engine.gradients(terms_of(units), 3, losses_of(other, "dpo"))))
    assert found.dtype == torch.float32
    assert torch.cosine_similarity(found.sum(0), exact, dim=0) > 0.99
    alone = OneUnitGradients(other.peft_model, loss_scale=other.loss_scale)
    one = torch.cat(list(alone.gradients(terms_of(units), 3, losses_of(other, "dpo"))))
    assert torch.cosine_similarity(one.sum(0), found.sum(0), dim=0) > 0.99


def test_dropout_is_drawn_per_row_and_off_for_what_must_be_repeatable(lora: LoraModel, start: Adapter) -> None:
    adapter = changed(start, seed=1)
    units, losses = random_units("dpo", 2, seed=0), losses_of(lora, "dpo")
    lora.start(adapter, adapter.names("A"), dropout=0.3)
    assert not torch.equal(losses(terms_of(units)), losses(terms_of(units)))
    kept = []
    for _ in range(2):
        lora.dropout.random = SecureRandom(b"k" * 32, stream=5)
        kept.append(losses(terms_of(units)))
    assert torch.equal(kept[0], kept[1])
    torch.manual_seed(0)
    first = losses(terms_of(units))
    torch.manual_seed(0)
    assert not torch.equal(losses(terms_of(units)), first)  # no seed reproduces the masks
    lora.start(adapter, adapter.names("A"))
    assert torch.equal(losses(terms_of(units)), losses(terms_of(units)))


def test_short_memory_halves_the_passes_and_changes_nothing(lora: LoraModel) -> None:
    units, losses = random_units("dpo", 6, seed=5), losses_of(lora, "dpo")
    expected = torch.cat(list(FlatGradients(lora.peft_model).gradients(terms_of(units), 6, losses)))

    def short(terms: list[Term]) -> torch.Tensor:
        if len(terms) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return losses(terms)

    for kind in (FlatGradients, OneUnitGradients):
        engine = kind(lora.peft_model, limit=PassLimit(rows=64))
        rows_in_any_order(torch.cat(list(engine.gradients(terms_of(units), 6, short))), expected)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="another"):
        list(engine.gradients(terms_of(units), 6, lambda terms: (_ for _ in ()).throw(RuntimeError("another"))))


@pytest.mark.parametrize(
    ("precision", "kind", "scale"),
    [
        ("float32", FlatGradients, 0.05),
        ("float32", FlatGradients, 20.0),  # an adapter that amplifies rounding
        ("bfloat16", OneUnitGradients, 2.0),
        ("float16", OneUnitGradients, 0.05),
    ],
)
def test_one_unit_more_changes_the_sum_by_at_most_c_also_by_what_it_does_to_the_others(
    model: ModelFolder,
    start: Adapter,
    precision: str,
    kind: type[FlatGradients] | type[OneUnitGradients],
    scale: float,
) -> None:
    """In shared passes it changes the padding and rounding of every one after it; what is kept free of C covers that."""
    adapter, clip = changed(start, seed=1, scale=scale), 0.1
    lora = loaded(model, adapter, "B", precision=precision)
    terms, losses = terms_of(random_units("dpo", 60, seed=0)), losses_of(lora, "dpo")
    engine = kind(lora.peft_model, limit=PassLimit(rows=16), loss_scale=lora.loss_scale)

    def clipped_sum(chosen: list[int]) -> torch.Tensor:
        own = [[terms[index]] for index in chosen]
        random = SecureRandom()
        return noisy_sum(own, engine, losses, clip_norm=clip, sigma=0.0, random=random)

    everyone = clipped_sum(list(range(60)))
    for left_out in (0, 31):
        rest = clipped_sum([index for index in range(60) if index != left_out])
        change = torch.linalg.vector_norm(everyone - rest).item()
        assert 0.0 < change <= clip


class TinyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2, bias=False)
        self.unused = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


TERMS = [Term(random_units("rft", 1, seed=s)[0].examples[0], unit) for unit, s in enumerate((1, 2, 3, 4))]


def test_fails_closed_where_a_gradient_would_not_be_clipped() -> None:
    for model in (
        nn.Sequential(nn.Linear(3, 2, bias=True)),
        nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2, bias=False)),
    ):
        with pytest.raises(PrivacyError, match="plain linear"):
            FlatGradients(model)


def test_a_parameter_without_a_gradient_stops_the_step() -> None:
    for kind in (FlatGradients, OneUnitGradients):
        head = TinyHead()
        with pytest.raises(PrivacyError, match=r"unused\.weight received no"):
            list(
                kind(head).gradients(TERMS, 4, lambda terms, head=head: head(torch.randn(len(terms), 2, 3)).sum((1, 2)))
            )


def test_a_gradient_past_the_engine_stops_the_step() -> None:
    head = nn.Sequential(nn.Linear(3, 2, bias=False))
    engine = FlatGradients(head)
    x = torch.randn(4, 2, 3)

    def past(terms: object) -> torch.Tensor:
        return head(x).sum((1, 2)) + (head[0].weight ** 2).sum()

    with pytest.raises(PrivacyError, match="without being clipped"):
        list(engine.gradients(TERMS, 4, past))
    with pytest.raises(PrivacyError, match="outside collect"):
        with engine.collect(4):
            engine.rows_belong_to([0, 1, 2, 3])
            output = head(x).sum()
            head(x).sum().backward()
        output.backward()


@pytest.mark.parametrize(
    "unit_of_row", [[2, 0, 1, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 2, 2], [1, 1, 2, 2, 0, 0]]
)
def test_rows_of_one_unit_are_summed_whatever_their_order(unit_of_row: list[int]) -> None:
    head = nn.Sequential(nn.Linear(3, 2, bias=False))
    x = torch.randn(6, 2, 3)
    engine = FlatGradients(head)
    with engine.collect(3) as gradients:
        engine.rows_belong_to(unit_of_row)
        head(x).square().sum().backward()
    for unit in range(3):
        own = x[torch.tensor(unit_of_row) == unit]
        (expected,) = torch.autograd.grad(head(own).square().sum(), head[0].weight)
        torch.testing.assert_close(gradients[unit], expected.flatten())
