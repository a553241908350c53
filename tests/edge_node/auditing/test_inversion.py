"""The attack on the embedded model: it works on bare updates, and not at the noise that is charged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from common.adapter import Adapter
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder
from edge_node.auditing.inversion import Victim, attack, audit_inversion, first_layer_inputs, trained
from edge_node.auditing.mechanism import AuditedMechanism
from edge_node.auditing.statement import Statement
from edge_node.training.lora_model import LoraModel
from tests.conftest import SHAPE

TEXT = "What is 47+85?"


@pytest.fixture(scope="module")
def lora(model: ModelFolder) -> LoraModel:
    return LoraModel(model, SHAPE)


@pytest.fixture(scope="module")
def statement(model: ModelFolder) -> Statement:
    from common.accounting import PrivateSteps

    charged = AuditedMechanism(PrivateSteps(1.2, 0.5, 10), clip_norm=0.1, delta=1e-5)
    return audit_inversion(model, SHAPE, charged, draws=8, texts=[TEXT], noises=(0.0, 1e-3))


def case_of(statement: Statement, factor: str, protection: str, noise: float) -> dict[str, object]:
    found = [
        case
        for case in statement.demonstration
        if (case["factor"], case["protection"], case["noise_multiplier"]) == (factor, protection, noise)
    ]
    assert len(found) == 1
    return dict(found[0])


def test_inputs_are_what_the_model_feeds_its_first_layer(model: ModelFolder, lora: LoraModel) -> None:
    seen: list[torch.Tensor] = []
    projection = dict(lora.peft_model.named_modules())["base_model.model.model.layers.0.self_attn.q_proj"]
    hook = projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = list(range(20, 60))
    with torch.no_grad():
        lora.peft_model(input_ids=torch.tensor([ids]))
    hook.remove()
    np.testing.assert_allclose(first_layer_inputs(model)[ids], seen[0][0].numpy(), atol=1e-4)


@pytest.mark.parametrize("phase", ["A", "B"])
def test_the_gradient_attacked_is_that_of_the_text(
    model: ModelFolder, lora: LoraModel, start: Adapter, phase: str
) -> None:
    """Against finite differences along the gradient itself."""
    victim = Victim(model, lora, trained(start), phase)
    ids = list(range(30, 50))
    gradient = victim.gradient(ids).double()
    names = start.names(phase)

    def loss() -> float:
        with torch.no_grad():
            logits = lora.peft_model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
        return nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item()

    values = {n.replace(".default", ""): p for n, p in lora.peft_model.named_parameters()}
    step = 1e-2 / gradient.norm().item()
    losses = []
    for sign in (1, -1):
        moved = trained(start).with_added(names, (sign * step * gradient).float().numpy())
        for name in names:
            values[name].data.copy_(torch.from_numpy(moved.tensors[name].copy()))
        losses.append(loss())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(gradient.square().sum().item(), rel=0.02)


def test_a_bare_update_names_every_token(statement: Statement) -> None:
    bare = case_of(statement, "A", "none", 0.0)
    assert bare["recovered"] == bare["ranked"] == bare["present"] == 8
    assert bare["false_positives"] == 0
    assert case_of(statement, "A", "clip", 0.0)["recovered"] == 8
    assert case_of(statement, "A", "clip and noise", 1e-3)["ranked"] == 8


def test_the_other_factor_shows_only_very_short_texts(
    model: ModelFolder,
    lora: LoraModel,
    start: Adapter,
    tokenizer: ChatTokenizer,
    statement: Statement,
    mechanism: AuditedMechanism,
) -> None:
    """With as many different tokens as the rank, every token of the vocabulary lies in the space."""
    assert case_of(statement, "B", "none", 0.0)["recovered"] >= 6  # type: ignore[operator]
    victim = Victim(model, lora, trained(start), "B")
    ids = tokenizer.encode_text("Anna Meyer owes 250 euro.")
    (bare,) = attack(victim, ids, mechanism, noises=(), draws=2)
    assert bare["ranked"] == 0
    assert bare["false_positives"] == victim.vocabulary - bare["present"]


def test_the_charged_noise_leaves_nothing_and_the_audit_passes(statement: Statement) -> None:
    assert statement.passed
    for factor in ("A", "B"):
        charged = case_of(statement, factor, "clip and noise", 1.2)
        assert charged["charged"]
        assert charged["recovered"] == 0
        assert charged["ranked"] < 5  # type: ignore[operator]


def test_noise_that_is_far_too_small_fails_the_audit(
    model: ModelFolder, mechanism: AuditedMechanism, noise_divided_by: Callable[[float], None]
) -> None:
    noise_divided_by(2000.0)
    statement = audit_inversion(model, SHAPE, mechanism, draws=8, texts=[TEXT], noises=())
    assert [check.code for check in statement.checks if not check.passed] == ["I2"]


def test_an_attack_that_cannot_work_is_no_evidence(model: ModelFolder, mechanism: AuditedMechanism) -> None:
    """A text with more different tokens than the space holds: the demonstration fails instead of reassuring."""
    long = "Please transfer 250 euro to Anna Meyer, IBAN DE89 3704."
    statement = audit_inversion(model, SHAPE, mechanism, draws=2, texts=[long], noises=())
    assert [check.code for check in statement.checks if not check.passed] == ["I1"]
