"""What TRL's trainers do to a LoRA adapter: three SGD steps, with every batch they took them on.

Each trainer runs as published, on a PEFT model loaded without our code; only where
its data comes from is replaced. GRPO and RLOO get logged answers in place of their
own generations, so that both sides train on the same old log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training.units import Answer

STEPS, BATCH = 3, 4


@dataclass(frozen=True)
class Captured:
    """The batches in order, as TRL's tensors, and the LoRA tensors after the last step, by PEFT name."""

    batches: tuple[dict[str, Tensor], ...]
    weights: dict[str, np.ndarray]


@dataclass(frozen=True)
class Logged:
    """An answer as it was logged, and its log-probabilities under the adapter a round starts from."""

    answer: Answer
    start_logps: tuple[float, ...]


def capture_dpo(
    model: ModelFolder,
    adapter: Adapter,
    folder: Path,
    rows: Sequence[dict[str, str]],
    *,
    beta: float,
    rate: float,
    loss_type: str = "sigmoid",
) -> Captured:
    """DPOTrainer on texts (`prompt`, `chosen`, `rejected`); its reference is a frozen copy of `adapter`."""
    batches: list[dict[str, Tensor]] = []

    class Recording(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            batches.append(_copy(inputs))
            return super()._compute_loss(model, inputs, return_outputs)

    trainer = Recording(
        model=peft_start(model, adapter),
        args=DPOConfig(beta=beta, loss_type=[loss_type], **_settings(folder, rate)),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=AutoTokenizer.from_pretrained(model.path),
    )
    return _captured(trainer, batches)


def capture_sft(
    model: ModelFolder, adapter: Adapter, folder: Path, answers: Sequence[Answer], *, rate: float
) -> Captured:
    """SFTTrainer on token ids; only the tokens the model wrote carry a label."""
    batches: list[dict[str, Tensor]] = []

    class Recording(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            batches.append(_copy(inputs))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    rows = [
        {
            "input_ids": [*a.prompt_ids, *a.completion_ids],
            "labels": [-100] * len(a.prompt_ids)
            + [i if w else -100 for i, w in zip(a.completion_ids, a.written, strict=True)],
        }
        for a in answers
    ]
    trainer = Recording(
        model=peft_start(model, adapter),
        args=SFTConfig(
            dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False, **_settings(folder, rate)
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model.path),
    )
    return _captured(trainer, batches)


def capture_grpo(
    model: ModelFolder,
    adapter: Adapter,
    folder: Path,
    batches: Sequence[Sequence[Logged]],
    *,
    beta: float,
    rate: float,
    importance_cap: float,
    delta: float | None = None,
) -> Captured:
    """GRPOTrainer on logged answers, as if another engine had served them.

    The answer's reward is its advantage; the round's start is both its old policy and its reference.

    Args:
        importance_cap: truncation of its correction for the serving engine.
        delta: its second bound on the ratio, which is our dual clip.
    """
    given = [_logged_inputs(rows, importance_cap) for rows in batches]
    remaining = iter(given)

    class OnLogged(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return dict(next(remaining))

    trainer = OnLogged(
        model=peft_start(model, adapter),
        reward_funcs=_no_reward,
        args=GRPOConfig(
            beta=beta,
            loss_type="grpo",
            delta=delta,
            use_bias_correction_kl=False,
            **_online(batches),
            **_settings(folder, rate),
        ),
        train_dataset=_prompts(),
        processing_class=AutoTokenizer.from_pretrained(model.path),
    )
    trainer.use_vllm = True  # its loss then applies `importance_sampling_ratio`; nothing is generated
    return _captured(trainer, given)


def capture_rloo(
    model: ModelFolder, adapter: Adapter, folder: Path, batches: Sequence[Sequence[Logged]], *, rate: float
) -> Captured:
    """RLOOTrainer on logged answers: one ratio to the behaviour policy per answer, no KL."""
    wanted = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_logps")
    given = [{name: inputs[name] for name in wanted} for inputs in (_logged_inputs(rows, 1.0) for rows in batches)]
    remaining = iter(given)

    class OnLogged(RLOOTrainer):
        def _generate_and_score_completions(self, inputs):
            return dict(next(remaining))

    trainer = OnLogged(
        model=peft_start(model, adapter),
        reward_funcs=_no_reward,
        args=RLOOConfig(beta=0.0, **_online(batches), **_settings(folder, rate)),
        train_dataset=_prompts(),
        processing_class=AutoTokenizer.from_pretrained(model.path),
    )
    return _captured(trainer, given)


def peft_start(model: ModelFolder, adapter: Adapter) -> PeftModel:
    """The base with `adapter` on it, all its factors trainable."""
    base = AutoModelForCausalLM.from_pretrained(model.path, local_files_only=True, dtype=torch.float32)
    shape = adapter.shape
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        target_modules=list(shape.target_modules),
        task_type="CAUSAL_LM",
    )
    peft_model = get_peft_model(base, config)
    for name, parameter in lora_parameters(peft_model).items():
        parameter.data.copy_(torch.from_numpy(adapter.tensors[name].copy()))
    return peft_model


def token_logps(peft_model: PeftModel, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Tensor:
    """Log-probability of each completion token, [K], of one row without padding."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    logps = peft_model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    return logps.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


def sft_answers(inputs: dict[str, Tensor]) -> list[Answer]:
    """The rows of an SFT batch, without padding."""
    rows = []
    for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True):
        labelled = [place for place, label in enumerate(labels) if label != -100]
        first, end = labelled[0], labelled[-1] + 1
        written = tuple(label != -100 for label in labels[first:end])
        rows.append(Answer(tuple(ids[:first]), tuple(ids[first:end]), written))
    return rows


def dpo_pairs(inputs: dict[str, Tensor]) -> list[tuple[Answer, Answer]]:
    """The (chosen, rejected) pairs of a DPO batch, TRL's rows [chosen; rejected] without padding."""
    rows = []
    for ids, attention, completion in zip(
        inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"], strict=True
    ):
        kept = attention.bool()
        tokens, is_completion = ids[kept].tolist(), completion[kept].tolist()
        split = is_completion.index(1)
        rows.append(Answer(tuple(tokens[:split]), tuple(tokens[split:]), (True,) * (len(tokens) - split)))
    half = len(rows) // 2
    return list(zip(rows[:half], rows[half:], strict=True))


def _logged_inputs(rows: Sequence[Logged], importance_cap: float) -> dict[str, Tensor]:
    """What TRL's rollout would have returned: prompts padded left, completions right."""
    answers = [row.answer for row in rows]
    prompts = [torch.tensor(a.prompt_ids) for a in answers]
    start_logps = _right([torch.tensor(row.start_logps) for row in rows])
    behaviour_logps = _right([torch.tensor(a.behaviour_logps) for a in answers])
    tool_mask = _right([torch.tensor(a.written, dtype=torch.int64) for a in answers])
    return {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
        "completion_ids": _right([torch.tensor(a.completion_ids) for a in answers]),
        "completion_mask": _right([torch.ones(len(a.completion_ids), dtype=torch.int64) for a in answers]),
        "tool_mask": tool_mask,
        "advantages": torch.tensor([a.reward for a in answers]),
        "old_per_token_logps": start_logps,
        "ref_per_token_logps": start_logps,
        "old_logps": behaviour_logps.sum(1),
        "importance_sampling_ratio": (start_logps - behaviour_logps).exp().clamp(max=importance_cap),
        "num_items_in_batch": tool_mask.sum(),
    }


def _right(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def _settings(folder: Path, rate: float) -> dict[str, Any]:
    """Plain SGD in float32: what TRL does by itself beyond the loss is off."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "optim": "sgd",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }


def _online(batches: Sequence[Sequence[Logged]]) -> dict[str, Any]:
    longest = max(len(row.start_logps) for rows in batches for row in rows)
    return {
        "num_generations": 2,
        "max_completion_length": longest,
        "steps_per_generation": 1,
        "num_iterations": 1,
    }


def _prompts() -> Dataset:
    """Never read: the rollout is replaced. TRL only counts them."""
    return Dataset.from_list([{"prompt": str(index)} for index in range(STEPS * BATCH)])


def _no_reward(completions: list[str], **_: object) -> list[float]:
    return [0.0] * len(completions)


def lora_parameters(peft_model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """By canonical name; a frozen reference copy of the adapter, as DPO keeps, is not among them."""
    return {
        name.replace(".default", ""): parameter
        for name, parameter in peft_model.named_parameters()
        if ".lora_" in name and ".default." in name
    }


def _captured(trainer: Any, batches: Sequence[dict[str, Tensor]]) -> Captured:
    trainer.train()
    weights = {name: p.detach().numpy().copy() for name, p in lora_parameters(trainer.model).items()}
    if len(batches) != STEPS:
        raise AssertionError(f"TRL took {len(batches)} batches, not {STEPS}")
    return Captured(tuple(batches), weights)


def _copy(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)}
