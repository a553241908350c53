"""Aggregation rules against Flower's strategies and against the memory of this machine.

python benchmarks/aggregation.py [--sites 20] [--parameters 5000000]

Every contender gets the same updates. Flower's get them as the arrays of replies,
in one layer of a matrix and one vector; making the replies is not timed. Times are
the least of several runs, in turn; memory is what the peak of the process rises by
above what it had with the updates, each contender in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

SITES, PARAMETERS, REPEATS = 20, 5_000_000, 5
_MEMORY_TURNS = 15
PAIRS = {
    "mean": "FedAvg",
    "median": "FedMedian",
    "trimmed-mean": "FedTrimmedAvg",
    "krum": "Krum",
    "multi-krum": "MultiKrum",
}
"""Our rule by name, and Flower's of the same definition."""


def drawn(sites: int, parameters: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((sites, parameters), dtype=np.float32)


def ours(name: str, updates_ND: np.ndarray, liars: int) -> Callable[[], object]:
    from aggregator.rules import RULES

    weights_N = np.ones(len(updates_ND))
    return lambda: RULES[name].decide(updates_ND, weights_N, liars)


def flowers(name: str, updates_ND: np.ndarray, liars: int) -> Callable[[], Callable[[], object]]:
    """Makes fresh replies, which some strategies empty, and returns what is timed."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import strategy
    from flwr.supercore.task_identity import TaskIdentity

    import deploy  # noqa: F401 - switches off telemetry

    logging.getLogger("flwr").setLevel(logging.WARNING)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    sites = len(updates_ND)
    settings: dict[str, dict[str, float]] = {
        "FedTrimmedAvg": {"beta": (liars + 0.5) / sites},
        "Krum": {"num_malicious_nodes": liars},
        "MultiKrum": {"num_malicious_nodes": liars, "num_nodes_to_select": sites - liars},
    }
    made = getattr(strategy, name)(**settings.get(name, {}))

    def prepare() -> Callable[[], object]:
        half = updates_ND.shape[1] // 2
        replies = []
        for update_D in updates_ND:
            question = Message(RecordDict(), dst_node_id=1, message_type="train")
            arrays = ArrayRecord([update_D[:half].reshape(-1, 10), update_D[half:]])
            content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
            replies.append(Message(RecordDict(content), reply_to=question))
        return lambda: made.aggregate_train(1, replies)

    return prepare


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def mean_against_memory(updates_ND: np.ndarray) -> str:
    """The mean's bytes a second beside those of copying (both ways counted) and reading (a maximum), in turn."""
    copy_ND = np.empty_like(updates_ND)
    mean = ours("mean", updates_ND, 1)
    speeds: dict[str, list[float]] = {"mean": [], "copy": [], "read": []}
    for _ in range(_MEMORY_TURNS):
        speeds["copy"].append(2 * updates_ND.nbytes / seconds(lambda: np.copyto(copy_ND, updates_ND)))
        speeds["mean"].append((updates_ND.nbytes + 4 * updates_ND.shape[1]) / seconds(mean))
        speeds["read"].append(updates_ND.nbytes / seconds(lambda: [row_D.max() for row_D in updates_ND]))
    best = {name: max(found) / 1e9 for name, found in speeds.items()}
    return (
        f"the mean moves {best['mean']:.1f} GB/s, a copy {best['copy']:.1f}, a maximum {best['read']:.1f}: "
        f"{best['mean'] / best['copy']:.0%} of copying, {best['mean'] / best['read']:.0%} of reading"
    )


def extra_megabytes(work: Callable[[], object]) -> float:
    """By how much the process grows at most while it works."""
    process = psutil.Process()
    before, highest, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, process.memory_info().rss)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return (highest - before) / 1e6


def measure_memory(contender: str, name: str, sites: int, parameters: int, liars: int) -> float:
    updates_ND = drawn(sites, parameters)
    work = ours(name, updates_ND, liars) if contender == "ours" else flowers(name, updates_ND, liars)()
    return extra_megabytes(work)


def memory_in_own_process(contender: str, name: str, sites: int, parameters: int) -> float:
    command = [sys.executable, __file__, "--memory", contender, name]
    command += ["--sites", str(sites), "--parameters", str(parameters)]
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run(command, capture_output=True, check=True, cwd=root)  # noqa: S603 - our own command
    return float(json.loads(ran.stdout))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=SITES)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--memory", nargs=2, metavar=("CONTENDER", "NAME"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from aggregator.rules import RULES, tolerated_liars

    liars = tolerated_liars(asked.sites)
    if asked.memory:
        print(json.dumps(measure_memory(*asked.memory, asked.sites, asked.parameters, liars)))
        return
    updates_ND = drawn(asked.sites, asked.parameters)
    print(f"{asked.sites} sites x {asked.parameters:,} parameters, {liars} liars tolerated")
    print(mean_against_memory(updates_ND))
    print("\n| rule | s | extra MB | Flower's | s | extra MB | Flower / ours |\n|---|---|---|---|---|---|---|")
    for name in RULES:
        rival = PAIRS.get(name)
        prepare = flowers(rival, updates_ND, liars) if rival else None
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(REPEATS):
            times["ours"].append(seconds(ours(name, updates_ND, liars)))
            if prepare and (turn < 2 or rival == "FedAvg"):
                times["theirs"].append(seconds(prepare()))
        fastest = min(times["ours"])
        line = f"| {name} | {fastest:.3f} | "
        line += f"{memory_in_own_process('ours', name, asked.sites, asked.parameters):.0f} | "
        if rival:
            theirs = min(times["theirs"])
            memory = memory_in_own_process("theirs", rival, asked.sites, asked.parameters)
            line += f"{rival} | {theirs:.3f} | {memory:.0f} | {theirs / fastest:.1f} |"
        else:
            line += "| | | |"
        print(line, flush=True)


if __name__ == "__main__":
    main()
