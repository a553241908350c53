"""Per-unit gradients against one-unit-at-a-time autograd, and against Opacus' hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from opacus.grad_sample import GradSampleHooks
from torch import nn

from common.adapter import Adapter
from common.errors import PrivacyError
from common.inference.model_folder import ModelFolder
from edge_node.training.dataset import PreferencePair, collate
from edge_node.training.dpo import dpo_losses
from edge_node.training.lora_model import LoraModel
from edge_node.training.unit_gradients import UnitGradients
from tests.conftest import SHAPE, changed


def random_pairs(count: int, *, seed: int) -> list[PreferencePair]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(6, 280, (length,), generator=generator).tolist())

    return [PreferencePair(ids(4, 12), ids(3, 20), ids(3, 20)) for _ in range(count)]


def losses(lora: LoraModel, pairs: list[PreferencePair]) -> torch.Tensor:
    chosen, rejected = lora.completion_logps(collate(pairs, pad_id=0)).chunk(2)
    zeros = torch.zeros(len(pairs))
    return dpo_losses(chosen, rejected, zeros, zeros + 0.3, beta=0.1)


@pytest.mark.parametrize("phase", ["A", "B"])
def test_equal_to_autograd_one_pair_at_a_time_and_to_opacus(model: ModelFolder, start: Adapter, phase: str) -> None:
    adapter, pairs = changed(start, seed=1), random_pairs(5, seed=0)
    names = adapter.names(phase)

    brute = LoraModel(model, SHAPE)
    brute.start(adapter, names)
    ordered = {n.replace(".default", ""): p for n, p in brute.peft_model.named_parameters() if p.requires_grad}
    expected = []
    for pair in pairs:
        brute.peft_model.zero_grad()
        losses(brute, [pair]).sum().backward()
        expected.append(torch.cat([ordered[name].grad.flatten() for name in names]))

    ours = LoraModel(model, SHAPE)
    ours.start(adapter, names)
    engine = UnitGradients(ours.peft_model)
    with engine.collect(torch.arange(5).repeat(2), 5) as gradients:
        losses(ours, pairs).sum().backward()
    assert [name.replace(".default", "") for name in engine.parameters] == list(names)
    torch.testing.assert_close(gradients, torch.stack(expected), atol=4e-6, rtol=1e-4)

    opacus = LoraModel(model, SHAPE)
    opacus.start(adapter, names)
    opacus.peft_model.train()  # its hooks are off in eval mode; there is no dropout
    hooks = GradSampleHooks(opacus.peft_model, loss_reduction="sum")
    losses(opacus, pairs).sum().backward()
    by_name = {n.replace(".default", ""): p for n, p in opacus.peft_model.named_parameters() if p.requires_grad}
    rows = torch.cat([by_name[name].grad_sample.flatten(1) for name in names], dim=1)
    torch.testing.assert_close(gradients, rows[:5] + rows[5:], atol=4e-6, rtol=1e-4)
    hooks.cleanup()


class TinyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2, bias=False)
        self.unused = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_fails_closed_where_a_gradient_would_not_be_clipped() -> None:
    with pytest.raises(PrivacyError, match="plain linear"):
        UnitGradients(nn.Sequential(nn.Linear(3, 2, bias=True)))
    with pytest.raises(PrivacyError, match="plain linear"):
        UnitGradients(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2, bias=False)))


def test_a_parameter_without_a_gradient_stops_the_step() -> None:
    head = TinyHead()
    engine = UnitGradients(head)
    with pytest.raises(PrivacyError, match=r"unused\.weight received no"), engine.collect(torch.arange(4), 4):
        head(torch.randn(4, 2, 3)).sum().backward()


def test_a_gradient_past_the_engine_stops_the_step() -> None:
    head = nn.Sequential(nn.Linear(3, 2, bias=False))
    engine = UnitGradients(head)
    x = torch.randn(4, 2, 3)
    with pytest.raises(PrivacyError, match="without being clipped"), engine.collect(torch.arange(4), 4):
        (head(x).sum() + (head[0].weight ** 2).sum()).backward()
    with pytest.raises(PrivacyError, match="outside collect"):
        with engine.collect(torch.arange(4), 4):
            output = head(x).sum()
            head(x).sum().backward()
        output.backward()


def test_rows_of_one_unit_are_summed_whatever_their_order() -> None:
    head = nn.Sequential(nn.Linear(3, 2, bias=False))
    reference = copy.deepcopy(head)
    x = torch.randn(6, 2, 3)
    engine = UnitGradients(head)
    unit_of_row = torch.tensor([2, 0, 1, 0, 2, 2])
    with engine.collect(unit_of_row, 3) as gradients:
        head(x).square().sum().backward()
    for unit in range(3):
        reference.zero_grad()
        reference(x[unit_of_row == unit]).square().sum().backward()
        torch.testing.assert_close(gradients[unit], reference[0].weight.grad.flatten())
