"""A whole federation on one machine, with the production code.

Set up hub and sites on disk, measure every site, run the rounds while simulated
users talk to the nodes, publish two bad versions as a drill, report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid

from aggregator.flower_sites import FlowerSites
from aggregator.round_log import RoundLog, RoundRecord
from aggregator.server_app import make_server_app, run_rounds, watch_canary
from aggregator.sites import Reply
from aggregator.witness import Witness
from common.errors import RoundError
from common.inference.model_folder import open_model
from deploy.absences import Absences, faults
from deploy.drills import crashing, fluent_but_worse
from deploy.founding import build_world, derived_seed, with_room_for_sketches
from deploy.local_grid import FIRST_NODE_ID, Faults, LocalGrid
from deploy.output import whole_folder
from deploy.ray_grid import run_on_ray
from deploy.reference import PublicReference
from deploy.report import Report, write_report
from deploy.settings import SimulationSettings
from deploy.simulated_site import SimulatedSite, make_simulated_client_app, open_site
from deploy.world import DrillResult, Exam, Progress, World
from edge_node.training.finished_updates import FinishedUpdates
from edge_node.training.trainer import planned_noise
from model_hub.rollout import Stage
from model_hub.version import Lineage

_HOUR_S = 3600.0
_CANARY_WINDOW_S = 20 * 60.0
_CANARY_REQUESTS = 20
_SITE_TIMEOUT_S = 3600.0


def simulate(settings: SimulationSettings, output: Path, progress: Progress) -> Path:
    """Run a simulation; `output` appears, complete, at the end.

    Raises:
        ConfigError: settings, model or output folder cannot work; nothing is left behind.
        PrivacyError: no noise reaches the budget.
    """
    model = open_model(settings.model)
    settings = with_room_for_sketches(settings, model)
    if not settings.unsafe_no_dp:  # before anything is made
        planned_noise(
            settings.training.plan(settings.algorithm),
            rounds=settings.rounds,
            epsilon_total=settings.epsilon,
            delta=settings.delta,
            counted=settings.min_samples > 0,
        )
    with whole_folder(output) as folder:
        started = time.monotonic()
        world = build_world(settings, model, folder, progress)
        try:
            _run_on_grid(world)
            report = Report.of(world, seconds=time.monotonic() - started)
        finally:
            world.close()
        write_report(report, folder)
    return output


def _run_on_grid(world: World) -> None:
    client_app = make_simulated_client_app(world.setups)
    cores = os.cpu_count() or 1
    torch.set_num_threads(1)  # sites run side by side; a tiny model gains nothing from more
    if world.settings.grid == "ray":
        run_on_ray(client_app, world.settings.sites, lambda grid: run_federation(world, grid), cpus=cores)
        return
    workers = min(cores, world.settings.sites)
    grid = LocalGrid(client_app, world.settings.sites, workers=workers, faults=_faults(world))
    try:
        grid.serve(make_server_app(lambda grid: run_federation(world, grid)))
    finally:
        grid.close()


def _faults(world: World) -> Faults:
    """Sites that are away, never so many that the attackers' refusal would leave no quorum."""
    settings, names = world.settings, world.settings.site_names
    absences = Absences(
        tuple(names),
        settings.drop,
        settings.slow,
        most=max(0, settings.sites - settings.attackers - world.federation.quorum),
        seed=derived_seed(settings.seed, "absences"),
        rounds=1 if settings.mode == "sealed" else world.federation.limits.window,
    )
    return faults(absences, lambda node: names[node - FIRST_NODE_ID], ("train", "query.secagg"))


def run_federation(world: World, grid: Grid) -> None:
    """The run itself, the same on every grid; the sites run `deploy.simulated_site`'s ClientApp."""
    sites = FlowerSites.connect(grid, world.federation)
    for site in sorted(set(world.federation.roster) - set(sites.names)):
        raise RoundError(f"{site} did not come up: {sites.absence(site)}")
    wait = _users_act(world, sites)
    world.progress.stage("measuring every site before training")
    _hold_exam(world, sites, round_number=0)

    def on_round(record: RoundRecord) -> None:
        world.rounds.append(record)
        if record.version is not None:
            world.distances[record.number] = _distance_to_honest_mean(world, record.version)
        world.progress.round_ended(record)
        world.progress.stage(f"round {record.number}: measuring")
        if record.number % world.settings.exam_every == 0 or record.number == world.settings.rounds:
            _hold_exam(world, sites, round_number=record.number)

    witness = Witness(world.folder / "aggregator" / "witness.json")
    log = RoundLog(world.folder / "aggregator")
    try:
        run_rounds(
            grid,
            world.federation,
            world.hub,
            witness,
            log,
            clock=world.clock,
            wait=wait,
            on_round=on_round,
            on_status=lambda status: world.progress.stage(str(status)),
            reference=PublicReference(open_site(world.reference).node, world.hub.adapter) if world.reference else None,
        )
    finally:
        log.close()
    if world.settings.drills:
        _run_drills(world, sites, wait)


def _users_act(world: World, sites: FlowerSites) -> Callable[[str], None]:
    """What happens while the aggregator waits: time passes and every site's users talk to its node."""

    def wait(reason: str) -> None:
        world.slices += 1
        number = len(world.rounds) + 1
        if reason == "collect":
            passed_s, requests = _HOUR_S, world.settings.requests_per_round
            world.progress.stage(f"round {number}: users talk, sites train")
        else:
            passed_s, requests = _CANARY_WINDOW_S, _CANARY_REQUESTS
            world.progress.stage(f"canary {world.hub.canary.id if world.hub.canary else ''}: gathering evidence")
        world.clock.set(world.clock() + passed_s)
        work = {
            site: {"requests": requests, "seed": derived_seed(world.settings.seed, "users", world.slices, site)}
            for site in sites.names
        }
        with ThreadPoolExecutor(max_workers=1) as beside:
            if world.reference is not None and reason == "collect":
                told = beside.submit(_public_users, open_site(world.reference), requests, world.settings, number)
                _ask_all(sites, "query.users", work)
                told.result()
            else:
                _ask_all(sites, "query.users", work)

    return wait


def _public_users(reference: SimulatedSite, requests: int, settings: SimulationSettings, number: int) -> None:
    """Public problems for the reference, as many as a site's users ask."""
    reference.look_again()
    reference.serve_users(requests, seed=derived_seed(settings.seed, "reference", number))


def _hold_exam(world: World, sites: FlowerSites, *, round_number: int) -> None:
    """Measure the stable version on each site's held-out problems; the same ones every time."""
    work = {
        site: {
            "problems": world.settings.exam_problems,
            "seed": derived_seed(world.settings.seed, "exam", site),
            "triggered": world.settings.has_backdoor,
        }
        for site in sites.names
    }
    replies = _ask_all(sites, "query.exam", work)
    for site, reply in replies.items():
        if reply.fields["version"] != world.hub.stable.id:
            raise RoundError(f"{site} serves {reply.fields['version']} instead of {world.hub.stable.id}")
    exam = Exam(
        round_number,
        world.hub.stable.id,
        {site: tuple(reply.fields["rewards"]) for site, reply in replies.items()},
        {site: float(reply.fields["epsilon"]) for site, reply in replies.items()},
        {site: float(reply.fields["right"]) for site, reply in replies.items()},
        {site: float(reply.fields["fooled"]) for site, reply in replies.items()} if world.settings.has_backdoor else {},
    )
    world.exams.append(exam)
    world.progress.exam_held(exam)


def _distance_to_honest_mean(world: World, version_id: str) -> float:
    """How far the published change of BA is from that of the honest mean, relative to the latter's norm.

    Only a simulation can know it: it reads what the honest sites keep for themselves.
    """
    version = world.hub.version(version_id)
    start, after = world.hub.adapter(str(version.parent)), world.hub.adapter(version_id)
    names = start.names(version.lineage.phase)
    honest = [
        update.delta_D
        for setup in world.setups
        if setup.hostility is None
        and (update := FinishedUpdates(setup.config.data_dir / "updates").get(version.lineage.plan_digest))
    ]
    before = start.products()
    wanted = start.with_added(names, np.asarray(np.mean(honest, axis=0, dtype=np.float64))).products() - before
    return float(np.linalg.norm(after.products() - before - wanted) / np.linalg.norm(wanted))


def _run_drills(world: World, sites: FlowerSites, wait: Callable[[str], None]) -> None:
    """Publish the two bad versions and watch what happens to them."""
    model = open_model(world.settings.model)
    for name, expected in (("crash", "errors"), ("worse", "reward")):
        stable = world.hub.stable
        start = world.hub.adapter(stable.id)
        bad = crashing(start) if name == "crash" else fluent_but_worse(start, model)
        version = world.hub.submit(
            bad,
            lineage=Lineage(stable.lineage.base_digest),
            largest_change=world.settings.clip_norm,
            unsafe_skip_gates=True,
        )
        world.hub.start_canary(version)
        watch_canary(sites, world.federation, world.hub, voters=sites.names, wait=wait)
        after = world.hub.version(version.id)
        caught = after.stage is Stage.ROLLED_BACK and after.reason.startswith(expected)
        world.drills.append(DrillResult(name, version.id, caught))


def _ask_all(sites: FlowerSites, kind: str, work: dict[str, dict[str, Any]]) -> dict[str, Reply]:
    """Ask every site something only a simulation asks; all of them must answer."""
    replies: dict[str, Reply] = {}
    for site, reply in sites.ask(kind, work, timeout_s=_SITE_TIMEOUT_S).items():
        if not isinstance(reply, Reply):
            raise RoundError(f"{reply.site} failed at {reply.stage}: {reply.reason}")
        replies[site] = reply
    return replies
