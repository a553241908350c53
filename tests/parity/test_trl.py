"""Noise-free private steps against TRL's DPOTrainer on the same batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training.dataset import PairBatch, PreferencePair, collate
from edge_node.training.dpo import dpo_losses
from edge_node.training.lora_model import LoraModel
from edge_node.training.private_step import ClippedSum
from edge_node.training.unit_gradients import UnitGradients
from tests.conftest import SHAPE, changed

STEPS, BATCH, RATE, BETA = 3, 4, 1e-2, 0.1
_NO_CLIP = 1e6


def test_three_steps_move_every_weight_where_trl_moves_it(model: ModelFolder, start: Adapter, tmp_path: Path) -> None:
    adapter = changed(start, seed=1)
    names = tuple(adapter.tensors)
    rows = [
        {"prompt": f"What is {a}+{b}?", "chosen": f" {a + b}", "rejected": f" {a - b} ; no"}
        for a, b in zip(range(11, 23), range(40, 52), strict=True)
    ]
    batches: list[dict[str, torch.Tensor]] = []

    class Recording(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            batches.append({key: value.clone() for key, value in inputs.items()})
            return super()._compute_loss(model, inputs, return_outputs)

    theirs = LoraModel(model, SHAPE)
    theirs.start(adapter, names)
    trainer = Recording(
        model=theirs.peft_model,
        args=DPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            optim="sgd",
            beta=BETA,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=7,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model.path),
    )
    trainer.train()
    expected = {
        n.replace(".default", ""): p.detach().numpy()
        for n, p in trainer.model.named_parameters()
        if ".lora_" in n and ".default." in n
    }

    ours, reference = LoraModel(model, SHAPE), LoraModel(model, SHAPE)
    ours.start(adapter, names)
    reference.start(adapter, ())
    engine = UnitGradients(ours.peft_model)
    for inputs in batches:
        batch = collate(_pairs(inputs), pad_id=0)
        with torch.no_grad():
            reference_chosen, reference_rejected = reference.completion_logps(batch).chunk(2)
        _step(ours, engine, batch, reference_chosen, reference_rejected)
    for name, after in ours.tensors(names).items():
        np.testing.assert_allclose(after, expected[name], atol=1e-7)
        assert np.abs(after - adapter.tensors[name]).max() > 1e-6  # it did move


def _step(
    model: LoraModel,
    engine: UnitGradients,
    batch: PairBatch,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
) -> None:
    """One step of the trainer's mechanism with noise off and nothing clipped."""
    with engine.collect(torch.arange(batch.pairs).repeat(2), batch.pairs) as gradients:
        chosen, rejected = model.completion_logps(batch).chunk(2)
        dpo_losses(chosen, rejected, reference_chosen, reference_rejected, beta=BETA).sum().backward()
    total = ClippedSum(engine.dimension, clip_norm=_NO_CLIP, noise_multiplier=0.0)
    total.spacing = 2.0**-40  # the lattice of a huge clip would round more than float32 does
    total.add(gradients)
    mean = (total.unsafe_release_without_noise() / batch.pairs).float()
    parameters = list(engine.parameters.values())
    for p, g in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        p.grad = g.view_as(p)
    torch.optim.SGD(parameters, lr=RATE).step()


def _pairs(inputs: dict[str, torch.Tensor]) -> list[PreferencePair]:
    """TRL's rows [chosen; rejected], without padding."""
    rows = []
    for ids, attention, completion in zip(
        inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"], strict=True
    ):
        kept = attention.bool()
        tokens, is_completion = ids[kept].tolist(), completion[kept].tolist()
        split = is_completion.index(1)
        rows.append((tuple(tokens[:split]), tuple(tokens[split:])))
    half = len(rows) // 2
    return [
        PreferencePair(prompt, chosen, rejected)
        for (prompt, chosen), (_, rejected) in zip(rows[:half], rows[half:], strict=True)
    ]
