"""How much of the honest step each rule keeps against lies, by how alike honest private updates are.

python benchmarks/lies_in_noise.py [--sites 20] [--hostile 4] [--rounds 10] [--alike 0.002 0.006 0.02 0.1]

Under local differential privacy an update is mostly noise: two honest ones are hardly more alike than chance, and the
cosine between them says how much there is to tell a lie by. Here they share one direction, their own parts differ by a
third, and all have the clip norm, which is how private updates of the embedded model come out. Shown is how far the
combined update goes along the shared direction, in per cent of how far the honest mean goes: 100 is a round without
liars, 0 one that learned nothing. `secagg_sketch` selects on 512 random projections and averages; nothing is
encrypted here.

`+reference` holds updates against a public reference first, whose cosine to the shared direction is `--agreement`; in
runs of the embedded model it was 0.7 to 0.87. `aside` knows that reference exactly, which no site does before it has
sent its update, and turns round everything but what lies along it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aggregator.rules import RULES, tolerated_liars
from common.outliers import against_reference
from common.secagg.selection import select
from deploy.attacks import ATTACKS
from deploy.attacks.scene import Scene

LIES = ("sign-flip", "ipm", "sybil", "min-max", "alie", "aside")
SKETCH, BESIDE = "secagg_sketch", "+reference"
DIMENSION, ROWS = 36864, 512


def honest_updates(rng: np.random.Generator, count: int, alike: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows whose cosines are `alike` in the mean, and what they share; float32 [count, DIMENSION], [DIMENSION]."""
    noise = rng.standard_normal((count, DIMENSION))
    common = rng.standard_normal(DIMENSION)
    common /= np.linalg.norm(common)
    shares = np.sqrt(alike) * (1 + rng.uniform(-1 / 3, 1 / 3, (count, 1)))
    rows = shares * common
    rows = rows + np.sqrt(1 - shares**2) * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32), common.astype(np.float32)


def reference_to(common: np.ndarray, rng: np.random.Generator, agreement: float) -> np.ndarray:
    """A unit vector that has this cosine to what the updates share."""
    other = rng.standard_normal(DIMENSION)
    other -= (other @ common) * common
    return (agreement * common + np.sqrt(1 - agreement**2) * other / np.linalg.norm(other)).astype(np.float32)


def attacked(name: str, updates: np.ndarray, liars: int, seed: int, reference: np.ndarray) -> np.ndarray:
    """The updates with the last rows as the attack makes them, within the clip norm."""
    if name == "aside":
        lies = updates[-liars:]
        return np.concatenate([updates[:-liars], 2 * np.outer(lies @ reference, reference) - lies])
    plan: Any = SimpleNamespace(clip_norm=1.0, weights=dict.fromkeys(range(len(updates)), 1))
    change = ATTACKS[name].change
    assert change is not None
    truth, lies = updates[:-liars], updates[-liars:]
    told = [change(Scene(plan, {}, own, liars, lies, truth, seed=seed + row)) for row, own in enumerate(lies)]
    return np.concatenate([truth, np.asarray(told, np.float32)])


def combined(rule: str, updates: np.ndarray, rng: np.random.Generator, reference: np.ndarray) -> np.ndarray:
    tolerated = budget = tolerated_liars(len(updates))
    if rule.endswith(BESIDE):
        rule = rule.removesuffix(BESIDE)
        cosines = updates @ reference / np.linalg.norm(updates, axis=1)
        against = against_reference(cosines, DIMENSION, liars=tolerated)
        out = np.empty(0, np.intp) if against is None else against[:tolerated]
        updates, budget = np.delete(updates, out, axis=0), tolerated - len(out)
    if rule != SKETCH:
        return RULES[rule].combine(updates, np.ones(len(updates)), tolerated)
    projected = updates @ rng.standard_normal((DIMENSION, ROWS), np.float32) / np.sqrt(ROWS)
    sketches = {f"{row:04}": sketch.astype(np.float64) for row, sketch in enumerate(projected)}
    chosen = select(sketches, clip_norm=1.0, disputes=(), budget=budget, minimum=2, seed=bytes(32))
    return updates[[int(name) for name in chosen.included]].mean(axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--hostile", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="averaged")
    parser.add_argument("--agreement", type=float, default=0.7, help="of the reference with what updates share")
    parser.add_argument("--alike", type=float, nargs="+", default=[0.002, 0.006, 0.02, 0.1])
    parser.add_argument("--rules", nargs="+", help="only these; all by default")
    asked = parser.parse_args()
    contenders = [SKETCH, *(rule for rule in RULES if rule != "krum")]  # which keeps one update and all of its noise
    contenders += [rule + BESIDE for rule in (SKETCH, "mean", "dnc", "nnm-trimmed-mean")]
    contenders = [rule for rule in contenders if rule in (asked.rules or contenders)]
    console = Console(width=150, highlight=False)
    for alike in asked.alike:
        kept: dict[tuple[str, str], list[float]] = {}
        for seed in range(asked.rounds):
            rng = np.random.default_rng(seed)
            updates, common = honest_updates(rng, asked.sites, alike)
            reference = reference_to(common, rng, asked.agreement)
            honest = updates[: -asked.hostile].mean(axis=0) @ common
            for lie in LIES:
                sent = attacked(lie, updates, asked.hostile, seed, reference)
                for rule in contenders:
                    share = combined(rule, sent, rng, reference) @ common / honest
                    kept.setdefault((rule, lie), []).append(100 * float(share))
        table = Table(
            title=f"{asked.hostile} of {asked.sites} lie, honest cosines {alike:g}: kept of the honest step, %"
        )
        for column in ("rule", *LIES):
            table.add_column(column)
        for rule in contenders:
            table.add_row(rule, *(f"{np.mean(kept[rule, lie]):.0f}" for lie in LIES))
        console.print(table)


if __name__ == "__main__":
    main()
