"""What carrying a round's messages costs: the in-process grid against warm Ray, and one round of 500 sites.

python benchmarks/grids.py [--sites 10] [--rounds 15] [--many 500] [--aggregation MODE] [--rule RULE]

Sites hand over stored updates of the embedded model's size, sealed and signed; nothing
trains. Overhead is the time of a whole `combine` minus that of the same round with
its sites called directly, all in turns in one process while Ray is warm.
The large round goes through `run_rounds`, from the signed plan to the decided canary.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0"})
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the sites are the threads

import numpy as np
import psutil
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.serverapp import Grid
from rich.console import Console
from rich.table import Table
from stored_sites import open_site, size_of, start, stored_site

import deploy  # noqa: F401 - switches off telemetry before libraries load
from aggregator.combine import OpenRound, combine
from aggregator.federation import Federation
from aggregator.flower_sites import FlowerSites
from aggregator.plan import make_plan
from aggregator.round_log import RoundLog
from aggregator.rules import default_rule
from aggregator.server_app import phase_shapes, run_rounds
from aggregator.sites import Question, Reply, Sites
from aggregator.witness import Witness
from common.identity import SealingKey, SigningKey, load_or_create_signing_key
from common.plan import Training
from common.secagg import MODES
from common.update import Aggregate, Refusal
from deploy.local_grid import LocalGrid
from deploy.ray_grid import run_on_ray
from edge_node.client_app import make_client_app
from model_hub.evidence import Thresholds
from model_hub.hub import Hub

TRAINING = Training("dpo", "sgd", 30.0, 2, 0.5, 100.0, 0.1, {"beta": 0.1})
CLIP_NORM = 6.0
TIMEOUT_S = 3600.0


def federation_of(folder: Path, sites: int, rule: str, key: SigningKey, *, aggregation: str = "sealed") -> Federation:
    roster = {site.name: site.key.public for site in (stored_site(folder, i) for i in range(sites))}
    weights = dict.fromkeys(roster, 1)
    return Federation(
        "bench",
        roster,
        weights,
        key,
        TRAINING,
        rule,
        1,
        CLIP_NORM,
        TIMEOUT_S,
        aggregation=aggregation,
        step_timeout_s=TIMEOUT_S,
    )


class NoGrid:
    """The sites called directly: what a round costs without carrying anything."""

    open: frozenset[str] = frozenset()

    def __init__(self, folder: Path, federation: Federation) -> None:
        self.names = tuple(federation.roster)
        self._sites = {f"site-{index + 1}": stored_site(folder, index) for index in range(len(self.names))}
        self._answers: list[tuple[str, Reply | Refusal]] = []

    def look_around(self) -> None:
        return None

    def absence(self, site: str) -> str:
        return ""

    def question(self, kind: str) -> Question:
        return self

    def ask(self, requests: Mapping[str, Mapping[str, Any]], **_: Any) -> Any:
        for site, request in requests.items():
            sealed = self._sites[site].hand_over(request["payload"], request["signature"], request["witness"])
            self._answers.append((site, Reply(asdict(sealed))))

    def answers(self) -> list[tuple[str, Reply | Refusal]]:
        came, self._answers = self._answers, []
        return came


def compare(folder: Path, sites: int, rounds: int, console: Console) -> None:
    """Print the overhead of a round on both grids, and their ratio."""
    key = load_or_create_signing_key(folder / "keys" / "aggregator.pem")
    federation = federation_of(folder, sites, "mean", key)
    hub = _hub(folder / "hub")
    sealing = SealingKey(X25519PrivateKey.generate())
    plan = make_plan(federation, hub.stable, start(), number=1, sealing_key=sealing, now_s=time.time())
    current = OpenRound(plan, sealing, phase_shapes(start(), plan.lora_phase))
    witness = Witness(folder / "witness.json")
    seconds: dict[str, list[float]] = {"no grid": [], "in-process": [], "Ray, warm": []}

    cpu = dict.fromkeys(seconds, 0.0)
    whole = psutil.Process()

    def cpu_s(name: str) -> float:
        """CPU seconds so far: of this process, for Ray also of all its processes."""
        others = whole.children(recursive=True) if name.startswith("Ray") else []
        times = [one.cpu_times() for one in others]
        return time.process_time() + sum(one.user + one.system for one in times)

    def on(connected: Sites) -> Callable[[], None]:
        def one_round() -> None:
            outcome = combine(current, connected, federation, witness)
            assert isinstance(outcome, Aggregate) and len(outcome.participants) == sites, outcome

        return one_round

    local = LocalGrid(
        make_client_app(open_site(folder)), sites, workers=os.cpu_count() or 1
    )  # before Ray names its run

    def in_turns(ray: Grid) -> None:
        contenders = {
            "no grid": on(NoGrid(folder, federation)),
            "in-process": on(FlowerSites.connect(local, federation)),
            "Ray, warm": on(FlowerSites.connect(ray, federation)),
        }
        for _ in range(4):  # every actor has opened every site
            for work in contenders.values():
                work()
        for _ in range(rounds):
            for name, work in contenders.items():
                begun, cpu_begun = time.perf_counter(), cpu_s(name)
                work()
                seconds[name].append(time.perf_counter() - begun)
                cpu[name] += cpu_s(name) - cpu_begun

    run_on_ray(make_client_app(open_site(folder)), sites, in_turns, cpus=os.cpu_count() or 1)
    local.close()
    hub.close()
    table = Table(title=f"one round, {sites} sites, {size_of(current.shapes)} values each, median of {rounds}")
    for column in (
        "carrier",
        "s",
        "quartiles",
        "overhead s",
        "× in-process",
        "CPU s",
        "overhead CPU s",
        "× in-process",
    ):
        table.add_column(column)
    wall = {name: median(values) for name, values in seconds.items()}
    mean_cpu = {name: total / rounds for name, total in cpu.items()}
    for name, values in seconds.items():
        low, high = np.quantile(values, [0.25, 0.75])
        cells = []
        for measured in (wall, mean_cpu):
            over = {carrier: measured[carrier] - measured["no grid"] for carrier in ("in-process", name)}
            ratio = f"{over[name] / over['in-process']:.1f}" if over["in-process"] > 0 else "not measurable"
            cells.append(("", "") if name == "no grid" else (f"{over[name]:.4f}", ratio))
        table.add_row(name, f"{wall[name]:.4f}", f"{low:.4f}–{high:.4f}", *cells[0], f"{mean_cpu[name]:.4f}", *cells[1])
    console.print(table)


def many(folder: Path, sites: int, rule: str, aggregation: str, console: Console) -> None:
    """Print time and memory of one whole round of many sites on the in-process grid."""
    key = load_or_create_signing_key(folder / "keys" / "aggregator.pem")
    federation = federation_of(folder, sites, rule, key, aggregation=aggregation)
    hub, log = _hub(folder / "many"), RoundLog(folder / "many" / "aggregator")
    grid = LocalGrid(make_client_app(open_site(folder)), sites, workers=os.cpu_count() or 1)
    memory = _Peak()
    memory.start()
    begun, cpu_begun, gathered = time.perf_counter(), time.process_time(), [0.0]

    def told(status: object) -> None:
        gathered[0] = time.perf_counter() - begun

    try:
        (record,) = run_rounds(
            grid,
            federation,
            hub,
            Witness(folder / "many" / "witness.json"),
            log,
            clock=time.time,
            wait=lambda reason: None,
            on_status=told,
        )
    finally:
        memory.stop()
        grid.close()
        log.close()
    assert len(record.participants) == sites, record
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    names = start().names("B")
    matrix_mb = sites * sum(start().tensors[name].size for name in names) * 4 / 1e6
    table = Table(title=f"one round of {sites} sites, rule {rule}, {aggregation}")
    for column in (
        "sites combined",
        "version is",
        "gathered after s",
        "all s",
        "CPU s",
        "peak MB above start",
        "× updates' own",
    ):
        table.add_column(column)
    grown_mb = memory.peak_mb - memory.first_mb
    stage = record.stage.value if record.stage else "voided"
    row = (f"{len(record.participants)}", stage, f"{gathered[0]:.1f}", f"{seconds:.1f}", f"{cpu_s:.1f}")
    table.add_row(*row, f"{grown_mb:.0f}", f"{grown_mb / matrix_mb:.1f}")
    console.print(table)
    hub.close()


class _Peak(threading.Thread):
    """Highest resident size of this process, looked at every few milliseconds (Linux)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first_mb = self.peak_mb = _resident_mb()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            self.peak_mb = max(self.peak_mb, _resident_mb())

    def stop(self) -> None:
        self._over.set()
        self.join()


def _resident_mb() -> float:
    with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - looked at often, and it costs the sites
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _hub(folder: Path) -> Hub:
    key = load_or_create_signing_key(folder / "hub.pem")
    hub = Hub(folder, key, base_model="embedded", clock=time.time, thresholds=Thresholds(minimum_time_s=0.0))
    hub.found(start(), base_digest="b" * 64)
    return hub


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--many", type=int, default=500, help="0: leave the large round out")
    parser.add_argument("--aggregation", choices=("sealed", *MODES), default="sealed", help="of the large round")
    parser.add_argument("--rule", default=None)
    chosen = parser.parse_args()
    console = Console(width=140, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        if chosen.many:
            rule = chosen.rule or (default_rule(chosen.many) if chosen.aggregation == "sealed" else "mean")
            many(Path(folder), chosen.many, rule, chosen.aggregation, console)
        if chosen.rounds:
            compare(Path(folder), chosen.sites, chosen.rounds, console)


if __name__ == "__main__":
    main()
