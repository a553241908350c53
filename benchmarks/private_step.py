"""One step of private preference training against non-private rivals, in time and in memory.

python benchmarks/private_step.py [--model FOLDER] [--pairs N] [--tokens T] [--factors AB|A|B] [--bf16]

All contenders train the same LoRA matrices on the same pairs, in turns of a few
steps, in one process on one thread. Times are CPU seconds, which other programs on
the machine disturb least. Memory is measured in a fresh process each: the highest
resident size during some steps minus the resident size before them (Linux).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"})

import datasets
import numpy as np
import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer

from common.adapter import Adapter, initial_adapter
from common.inference.model_folder import EMBEDDED, open_model
from edge_node.config import LoraSettings
from edge_node.training.batch import Term, collate, completions
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.objectives import objective_of
from edge_node.training.trainer import OPTIMIZERS, Losses, noisy_sum
from edge_node.training.unit_gradients import FlatGradients
from edge_node.training.units import Answer

BETA, RATE, CLIP_NORM, SIGMA = 0.1, 1e-4, 0.1, 1.0
STEPS_FOR_MEMORY = 2

Pair = tuple[Answer, Answer]
Steps = Callable[[int], list[float]]
"""Runs that many steps and returns the CPU seconds of each."""


@dataclass(frozen=True)
class Task:
    """What every contender trains: `factors` of the LoRA matrices of a model, on given pairs."""

    model: Path
    pairs: tuple[Pair, ...]
    factors: str

    def loaded(self) -> LoraModel:
        """The model at the same start for everybody."""
        folder, shape = open_model(self.model), LoraSettings().shape
        adapter = _nonzero(initial_adapter(folder.module_shapes(), shape, seed=0))
        names = tuple(name for factor in self.factors for name in adapter.names(factor))
        model = LoraModel(folder, shape)
        model.start(adapter, names)
        return model


def private(task: Task, model: LoraModel) -> Steps:
    """Our step: per-pair gradients, clip, sum, noise, optimizer; reference log-probs computed before."""
    with torch.no_grad():
        terms = [Term(pair) for pair in task.pairs]
        batch = collate(terms, pad_id=0)
        start_logps = completions(model.token_logps(batch).logps_BK, terms)
    units = [[Term(pair, start_logps=logps)] for pair, logps in zip(task.pairs, start_logps, strict=True)]
    engine = FlatGradients(model.peft_model)
    losses = Losses(model, *objective_of("dpo", {"beta": BETA}), 0)
    parameters = list(engine.parameters.values())
    optimizer, random = OPTIMIZERS["adam"](parameters, RATE), SecureRandom()

    def step() -> None:
        released_D = noisy_sum(units, engine, losses, clip_norm=CLIP_NORM, sigma=SIGMA, random=random)
        mean_D = (released_D / len(units)).float()
        for p, gradient in zip(parameters, mean_D.split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.view_as(p)
        optimizer.step()

    return _timed(step)


def bare_loop(task: Task, model: LoraModel) -> Steps:
    """Plain PyTorch without privacy: one batch, fused AdamW, reference computed before, completions only."""
    rows = [pair[side] for side in (0, 1) for pair in task.pairs]
    longest, shortest_prompt = max(a.length for a in rows), min(len(a.prompt_ids) for a in rows)
    ids_BT, mask_BT = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest)
    for row, a in enumerate(rows):
        ids_BT[row, : a.length] = torch.tensor(a.prompt_ids + a.completion_ids)
        mask_BT[row, len(a.prompt_ids) : a.length] = 1.0
    kept = longest - shortest_prompt

    def summed_logps() -> Tensor:
        output = model.peft_model(input_ids=ids_BT, logits_to_keep=kept + 1, use_cache=False)
        logps_BKV = output.logits[:, :-1].log_softmax(-1)
        return (logps_BKV.gather(-1, ids_BT[:, -kept:, None])[..., 0] * mask_BT[:, -kept:]).sum(1)

    with torch.no_grad():
        reference_chosen, reference_rejected = summed_logps().chunk(2)
    optimizer = torch.optim.AdamW([p for p in model.peft_model.parameters() if p.requires_grad], lr=RATE, fused=True)

    def step() -> None:
        chosen, rejected = summed_logps().chunk(2)
        margin = (chosen - rejected) - (reference_chosen - reference_rejected)
        (-functional.logsigmoid(BETA * margin)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step)


def trl_defaults(task: Task, model: LoraModel) -> Steps:
    """DPOTrainer as it comes: bfloat16 autocast, checkpointing, reference forward in each step."""
    return _trl(task, model.peft_model, {})


def trl_float32(task: Task, model: LoraModel) -> Steps:
    """Its defaults without bfloat16, which processors that lack it emulate slowly."""
    return _trl(task, model.peft_model, {"bf16": False})


def trl_lean(task: Task, model: LoraModel) -> Steps:
    """DPOTrainer with everything off that costs time: what is left is its own."""
    lean = {"bf16": False, "gradient_checkpointing": False, "precompute_ref_log_probs": True}
    return _trl(task, model.peft_model, lean)


RIVAL = "bare PyTorch loop"
BF16 = "TRL DPOTrainer, defaults"
CONTENDERS: Mapping[str, Callable[[Task, LoraModel], Steps]] = {
    "Headwater, private": private,
    RIVAL: bare_loop,
    "TRL DPOTrainer, lean": trl_lean,
    "TRL DPOTrainer, defaults in float32": trl_float32,
    BF16: trl_defaults,
}


class _StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self._started)


class _OnTokens(DPOTrainer):
    """Takes a dataset of token ids instead of texts."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def _trl(task: Task, peft_model: PeftModel, settings: dict[str, Any]) -> Steps:
    times = _StepTimes()
    rows = [
        {
            "prompt_ids": list(chosen.prompt_ids),
            "chosen_ids": list(chosen.completion_ids),
            "rejected_ids": list(rejected.completion_ids),
        }
        for chosen, rejected in task.pairs
    ]
    trainer = _OnTokens(
        model=peft_model,
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=len(rows),
            max_steps=1,
            learning_rate=RATE,
            beta=BETA,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[times],
    )

    trainer.remove_callback(PrinterCallback)

    def steps(count: int) -> list[float]:
        times.seconds.clear()
        trainer.args.max_steps = count
        trainer.train()
        return list(times.seconds)

    return steps


def _timed(step: Callable[[], None]) -> Steps:
    def steps(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            started = time.process_time()
            step()
            seconds.append(time.process_time() - started)
        return seconds

    return steps


def measured_seconds(task: Task, names: list[str], *, blocks: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step by contender, after one step to warm up; each block starts at another contender."""
    contenders = {name: CONTENDERS[name](task, task.loaded()) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in contenders.values():
        run(1)
    for block in range(blocks):
        shift = block % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            seconds[name] += contenders[name](steps)
    return seconds


def peak_megabytes(task: Task, name: str) -> float:
    """Highest resident size during some steps of a contender, above that of the loaded model."""
    torch.set_num_threads(1)
    model = task.loaded()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status_megabytes("VmRSS")
    CONTENDERS[name](task, model)(STEPS_FOR_MEMORY)
    return _status_megabytes("VmHWM") - before


def _status_megabytes(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


def _nonzero(adapter: Adapter) -> Adapter:
    """B factors that are not zero, or the A factors would have no gradient."""
    rng = np.random.default_rng(0)
    return Adapter(
        adapter.shape, {n: rng.normal(0, 0.02, t.shape) if "lora_B" in n else t for n, t in adapter.tensors.items()}
    )


def random_pairs(count: int, tokens: int, vocabulary: int) -> tuple[Pair, ...]:
    """Prompts of half the tokens and completions of a quarter to a half."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(6, vocabulary, length).tolist())

    def answer(prompt: tuple[int, ...], length: int) -> Answer:
        return Answer(prompt, ids(length), (True,) * length)

    pairs = []
    for _ in range(count):
        prompt = ids(tokens // 2)
        chosen, rejected = rng.integers(tokens // 4, tokens // 2, 2, endpoint=True).tolist()
        pairs.append((answer(prompt, chosen), answer(prompt, rejected)))
    return tuple(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="local Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="longest row")
    parser.add_argument("--factors", choices=("AB", "A", "B"), default="AB", help="LoRA factors that are trained")
    parser.add_argument("--blocks", type=int, default=8, help="turns of every contender")
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--bf16", action="store_true", help="also TRL with its bfloat16; slow where it is emulated")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary = open_model(asked.model).dimensions.vocabulary
    task = Task(asked.model, random_pairs(asked.pairs, asked.tokens, vocabulary), asked.factors)
    names = [name for name in CONTENDERS if asked.bf16 or name != BF16]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        megabytes = {name: fresh.apply(peak_megabytes, (task, name)) for name in names}
    seconds = measured_seconds(task, names, blocks=asked.blocks, steps=asked.steps)
    title = f"{asked.model.name}, {asked.pairs} pairs, rows of up to {asked.tokens} tokens, factors {asked.factors}"
    Console(width=120).print(_table(title, seconds, megabytes))


def _table(title: str, seconds: Mapping[str, list[float]], megabytes: Mapping[str, float]) -> Table:
    """Medians; `x rival` is relative to the bare loop of the same run."""
    table = Table(title=title)
    for column in ("contender", "s/step", "quartiles", "x rival", "peak MB", "x rival"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, found in seconds.items():
        low, high = np.quantile(found, (0.25, 0.75))
        table.add_row(
            f"{name} (rival)" if name == RIVAL else name,
            f"{median(found):.4g}",
            f"{low:.4g}–{high:.4g}",
            f"{median(found) / median(seconds[RIVAL]):.2f}",
            f"{megabytes[name]:.0f}",
            f"{megabytes[name] / megabytes[RIVAL]:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
