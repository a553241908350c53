"""What privacy costs in reward: epsilon × LoRA mode × objective, on the embedded model's task.

One site with many trajectories, the product's own datasets, steps and noise. Every
cell tunes its learning rate on the same grid and takes the checkpoint with the best
reward on a validation set of problems; what is printed is the reward on other
held-out problems, with an interval over independent runs. `inf` is the same
training with its noise off.

    python benchmarks/utility.py run --results runs/utility.jsonl --objectives dpo ppo    # resumes where it stopped
    python benchmarks/utility.py table --results runs/utility.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from common.accounting import noise_multiplier_for
from common.adapter import Adapter, LoraShape, initial_adapter
from common.chat import Message
from common.inference.batching import Batcher, Generation, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine
from common.inference.model_folder import EMBEDDED, TARGET_MODULES, ModelFolder, open_model
from common.inference.sampling import SamplingParameters
from common.tasks import math as task
from edge_node.training.batch import PassLimit, Term, collate, completions
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.objectives import objective_of
from edge_node.training.trainer import Losses, noisy_sum
from edge_node.training.unit_gradients import FlatGradients
from edge_node.training.units import Answer, Example

EPSILONS = (8.0, math.inf, 3.0, 1.0)
MODES = ("alternate", "ffa", "balanced")
"""`balanced` is `alternate` with factors of equal norm after A rounds; with DPO only."""
OBJECTIVES = ("dpo", "ppo", "rft", "bco", "grpo")
RATES = (30.0, 90.0)
RUNS = 3
DELTA = 1e-5
SHAPE = LoraShape(8, 16.0, TARGET_MODULES)
ROUNDS, STEPS, SAMPLING_RATE, CLIP, UPDATE_CLIP = 4, 2, 0.25, 0.1, 6.0
PROBLEMS, ANSWERS, SINGLE_ANSWERS = 600, 4, 2
VALIDATION, TEST = 60, 250
ADVANTAGE = {"ppo": {"baseline": 0.5}}


@dataclass(frozen=True)
class Cell:
    """What one row of the table is about."""

    epsilon: float
    mode: str
    objective: str


@dataclass(frozen=True)
class Run:
    """One training: its settings, and the test reward of its best checkpoint and of the start."""

    epsilon: float
    mode: str
    objective: str
    rate: float
    number: int
    start: float
    validation: float
    reward: float
    seconds: float


class Bench:
    """The model, its serving engine, and the answers it gives before any training."""

    def __init__(self) -> None:
        self.folder: ModelFolder = open_model(EMBEDDED)
        self.tokenizer = ChatTokenizer(self.folder)
        self.engine = Engine(self.folder, provider="cpu", slots=64, context_tokens=96, threads=1)
        self.batcher = Batcher(self.engine)
        self.model = LoraModel(self.folder, SHAPE)
        self.start = initial_adapter(self.folder.module_shapes(), SHAPE, seed=0)
        held_out = list(islice(task.problems(task.Distribution(), task.Split.HELD_OUT, seed=1), VALIDATION + TEST))
        self.validation, self.test = held_out[:VALIDATION], held_out[VALIDATION:]
        self.served = self._serve()
        self.start_reward = self.reward(self.start, self.test)

    def answers(self, adapter: Adapter, problems: list[task.Problem], count: int) -> list[list[Generation]]:
        loaded = self.engine.load(adapter)
        prompts = [self.tokenizer.encode([Message("user", problem.prompt)]) for problem in problems]
        futures: list[list[Future[Generation]]] = [
            [
                self.batcher.submit(GenerationRequest(prompt, 48, SamplingParameters(), seed=1000 * i + k), loaded)
                for k in range(count)
            ]
            for i, prompt in enumerate(prompts)
        ]
        return [[future.result() for future in row] for row in futures]

    def reward(self, adapter: Adapter, problems: list[task.Problem]) -> float:
        scores = [
            task.score_answer(problem, self.tokenizer.decode(generation.token_ids)).total
            for problem, row in zip(problems, self.answers(adapter, problems, 2), strict=True)
            for generation in row
        ]
        return statistics.fmean(scores)

    def _serve(self) -> list[tuple[Answer, ...]]:
        """Answers of the untrained model to training problems, with their rewards."""
        problems = list(islice(task.problems(task.Distribution(), task.Split.TRAIN, seed=0), PROBLEMS))
        return [
            tuple(
                Answer(
                    tuple(self.tokenizer.encode([Message("user", problem.prompt)])),
                    tuple(g.token_ids),
                    (True,) * len(g.token_ids),
                    tuple(g.logprobs),
                    task.score_answer(problem, self.tokenizer.decode(g.token_ids)).total,
                )
                for g in row
            )
            for problem, row in zip(problems, self.answers(self.start, problems, ANSWERS), strict=True)
        ]

    def examples(self, objective: str) -> list[Example]:
        """What the objective learns from; each answer is in at most one example."""
        kind = objective_of(objective, {})[0].kind
        if kind == "groups":
            return list(self.served)
        if kind == "pairs":
            twos = [row[i : i + 2] for row in self.served for i in (0, 2)]
            return [tuple(sorted(t, key=lambda a: -a.reward)) for t in twos if abs(t[0].reward - t[1].reward) >= 0.05]
        answers = [answer for row in self.served for answer in row[:SINGLE_ANSWERS]]
        if kind == "thumbs":
            return [
                (Answer(a.prompt_ids, a.completion_ids, a.written, a.behaviour_logps, 1.0 if a.reward > 0.7 else -1.0),)
                for a in answers
            ]
        return [(answer,) for answer in answers]

    def train(self, cell: Cell, rate: float, number: int) -> Run:
        """All rounds of one run; the adapter after each round is a checkpoint."""
        started = time.perf_counter()
        examples = self.examples(cell.objective)
        sigma = 0.0
        if math.isfinite(cell.epsilon):
            sigma = noise_multiplier_for(
                target_epsilon=cell.epsilon, delta=DELTA, sampling_rate=SAMPLING_RATE, steps=ROUNDS * STEPS
            )
        adapter, best = self.start, (-1.0, self.start)
        for round_number in range(ROUNDS):
            phase = "A" if cell.mode != "ffa" and round_number % 2 else "B"
            adapter = self._round(adapter, phase, cell.objective, examples, rate, sigma)
            if cell.mode == "balanced" and phase == "A":
                adapter = adapter.balanced()
            best = max(best, (self.reward(adapter, self.validation), adapter), key=lambda found: found[0])
        return Run(
            cell.epsilon,
            cell.mode,
            cell.objective,
            rate,
            number,
            self.start_reward,
            best[0],
            self.reward(best[1], self.test),
            time.perf_counter() - started,
        )

    def _round(
        self, adapter: Adapter, phase: str, objective: str, examples: list[Example], rate: float, sigma: float
    ) -> Adapter:
        names = adapter.names(phase)
        self.model.start(adapter, names)
        method, values = objective_of(objective, ADVANTAGE.get(objective, {}))
        losses = Losses(self.model, method, values, self.tokenizer.pad_id)
        engine = FlatGradients(self.model.peft_model, limit=PassLimit(rows=64))
        optimizer = torch.optim.SGD(list(engine.parameters.values()), lr=rate)
        random = SecureRandom()
        batches = [np.flatnonzero(random.bernoulli(SAMPLING_RATE, len(examples))) for _ in range(STEPS)]
        sampled = sorted(set(np.concatenate(batches).tolist()))
        terms = dict(zip(sampled, self._terms([examples[i] for i in sampled]), strict=True))
        for chosen in batches:
            units = [[terms[i]] for i in chosen.tolist()]
            released = noisy_sum(units, engine, losses, clip_norm=CLIP, sigma=sigma, random=random)
            mean = (released / (SAMPLING_RATE * len(examples))).float()
            sizes = [p.numel() for p in engine.parameters.values()]
            for p, gradient in zip(engine.parameters.values(), mean.split(sizes), strict=True):
                p.grad = gradient.view_as(p)
            optimizer.step()
        after = np.concatenate([t.reshape(-1) for t in self.model.tensors(names).values()])
        change = after - adapter.flatten(names)
        return adapter.with_added(names, change * min(1.0, UPDATE_CLIP / max(float(np.linalg.norm(change)), 1e-9)))

    @torch.no_grad()
    def _terms(self, examples: list[Example]) -> Iterator[Term]:
        plain = [Term(example) for example in examples]
        for part in PassLimit(rows=128).passes(plain):
            batch = collate(part, pad_id=self.tokenizer.pad_id)
            logps = self.model.token_logps(batch).logps_BK
            for term, start in zip(part, completions(logps, part), strict=True):
                yield Term(term.example, start_logps=start)


def run(results: Path, objectives: list[str], minutes: float) -> None:
    """Every cell's grid once, then more runs at its best rate, until all are there or time is up."""
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * minutes
    bench = Bench()
    results.parent.mkdir(parents=True, exist_ok=True)
    for objective, mode, epsilon in product(objectives, MODES, EPSILONS):
        cell = Cell(epsilon, mode, objective)
        if mode == "balanced" and objective != "dpo":
            continue
        for rate, number in _wanted(cell, results):
            if time.monotonic() > end:
                return
            made = bench.train(cell, rate, number)
            with results.open("a") as file:
                file.write(json.dumps(asdict(made)) + "\n")
            print(made, flush=True)


def _wanted(cell: Cell, results: Path) -> Iterator[tuple[float, int]]:
    for rate in RATES:
        if not any(r.rate == rate for r in _of(cell, results)):
            yield rate, 0
    best = max(_of(cell, results), key=lambda r: r.validation if r.number == 0 else -1.0).rate
    for number in range(1, RUNS):
        if not any(r.rate == best and r.number == number for r in _of(cell, results)):
            yield best, number


def _of(cell: Cell, results: Path) -> list[Run]:
    runs = [Run(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    return [r for r in runs if Cell(r.epsilon, r.mode, r.objective) == cell]


def table(results: Path) -> None:
    """Markdown: mean gain on the test problems and its 95 % interval over runs at the tuned rate."""
    runs = [Run(**json.loads(line)) for line in results.read_text().splitlines()]
    gains: dict[Cell, list[float]] = defaultdict(list)
    rates: dict[Cell, float] = {}
    for cell in dict.fromkeys(Cell(r.epsilon, r.mode, r.objective) for r in runs):
        own = _of(cell, results)
        rates[cell] = max((r for r in own if r.number == 0), key=lambda r: r.validation).rate
        gains[cell] = [r.reward - r.start for r in own if r.rate == rates[cell]]
    print(
        f"start {runs[0].start:.3f}\n\n| objective | mode | "
        + " | ".join(f"ε = {e:g}" for e in sorted(EPSILONS))
        + " |"
    )
    print("|---|---|" + "---|" * len(EPSILONS))
    for objective, mode in product(OBJECTIVES, MODES):
        cells = [Cell(e, mode, objective) for e in sorted(EPSILONS)]
        if any(cell in gains for cell in cells):
            print(f"| {objective} | {mode} | " + " | ".join(_text(gains.get(c), rates.get(c)) for c in cells) + " |")


def _text(found: list[float] | None, rate: float | None) -> str:
    if not found:
        return ""
    mean = statistics.fmean(found)
    if len(found) < 2:
        return f"{mean:+.3f} (1 run, lr {rate:g})"
    half = stats.t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return f"{mean:+.3f} ± {half:.3f} (lr {rate:g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--minutes", type=float, default=1e9)
    chosen = parser.parse_args()
    run(chosen.results, chosen.objectives, chosen.minutes) if chosen.command == "run" else table(chosen.results)


if __name__ == "__main__":
    main()
