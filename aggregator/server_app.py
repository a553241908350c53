"""The main job, top to bottom: plan, combine, publish, watch the canary; then again.

Works over any Flower grid: in this process, over Ray, or over a SuperLink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from aggregator.combine import OpenRound, combine
from aggregator.federation import Federation
from aggregator.flower_sites import FlowerSites
from aggregator.golden import golden_request, paired_outcomes
from aggregator.plan import make_plan
from aggregator.publish import publish
from aggregator.sites import is_silence
from aggregator.witness import Witness
from common.adapter import Adapter
from common.identity import SealingKey
from common.update import Refusal, Voided
from model_hub.hub import Hub
from model_hub.rollout import Stage

_GOLDEN_TIMEOUT_S = 300.0

Wait = Callable[[str], None]
"""Called where the aggregator has nothing to do until the sites did something: `collect` or `canary`."""


@dataclass(frozen=True)
class RoundRecord:
    """What became of one round; `version` and `stage` are None where it was voided."""

    number: int
    participants: tuple[str, ...]
    refused: tuple[Refusal, ...]
    version: str | None
    stage: Stage | None
    void_reason: str | None = None


def run_rounds(
    grid: Grid,
    federation: Federation,
    hub: Hub,
    witness: Witness,
    *,
    clock: Callable[[], float],
    wait: Wait,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> list[RoundRecord]:
    """Run all planned rounds, or until they stop bearing fruit.

    Args:
        grid: a Flower grid whose nodes run `edge_node.client_app`.
        witness: remembers the state of each site's privacy ledger.
        clock: seconds since the epoch, for deadlines.
        wait: see `Wait`; in production it sleeps, in a simulation the users act.
        on_round: told of each round as it ends.
    """
    sites = FlowerSites.connect(grid, federation)
    if hub.canary is not None:  # one that an earlier run left undecided
        watch_canary(sites, federation, hub, voters=hub.canary.lineage.participants or sites.names, wait=wait)
    records = []
    for number in range(1, federation.planned_rounds + 1):
        wait("collect")
        sites.refresh()
        current = open_round(federation, hub, number=number, now_s=clock())
        outcome = combine(current, sites, federation, witness)
        if isinstance(outcome, Voided):
            record = RoundRecord(number, (), outcome.refusals, None, None, outcome.reason)
        else:
            version = publish(outcome, current.plan, hub, balance=federation.balance)
            watch_canary(sites, federation, hub, voters=outcome.participants, wait=wait)
            stage = hub.version(version.id).stage
            record = RoundRecord(number, outcome.participants, outcome.refusals, version.id, stage)
        records.append(record)
        on_round(record)
        if federation.patience and _fruitless(records) >= federation.patience:
            break
    return records


def _fruitless(records: Sequence[RoundRecord]) -> int:
    """Rounds at the end that brought no promoted version."""
    promoted = [record.stage is Stage.STABLE for record in reversed(records)]
    return promoted.index(True) if True in promoted else len(promoted)


def open_round(federation: Federation, hub: Hub, *, number: int, now_s: float) -> OpenRound:
    """A plan on the stable version, with a fresh key to seal updates to."""
    sealing_key = SealingKey(X25519PrivateKey.generate())
    stable = hub.stable
    adapter = hub.adapter(stable.id)
    plan = make_plan(federation, stable, adapter, number=number, sealing_key=sealing_key, now_s=now_s)
    return OpenRound(plan, sealing_key, phase_shapes(adapter, plan.lora_phase))


def phase_shapes(adapter: Adapter, phase: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of what one phase trains, in sorted order."""
    return {name: adapter.tensors[name].shape for name in adapter.names(phase)}


def watch_canary(sites: FlowerSites, federation: Federation, hub: Hub, *, voters: Sequence[str], wait: Wait) -> None:
    """Replay golden prompts on both arms, window after window, until the hub has decided.

    Only `voters` are asked: a site whose update was refused has no say in what is
    served. A site that does not answer in time is not asked again for this canary.
    """
    asked = [site for site in sites.names if site in voters]
    while (canary := hub.canary) is not None:
        wait("canary")
        window = len(hub.catalog.evidence(canary.id))  # also after a restart: no window is asked twice
        requests = {site: golden_request(canary.id, hub.stable.id, window=window, site=site) for site in asked}
        replies = sites.ask("query.golden", requests, timeout_s=_GOLDEN_TIMEOUT_S)
        asked = [site for site in asked if not is_silence(replies[site])]
        outcomes = {
            site: paired_outcomes(reply, requests[site], site_public=federation.roster[site])
            for site, reply in replies.items()
        }
        hub.observe(outcomes)


def make_server_app(main: Callable[[Grid], None]) -> ServerApp:
    """A Flower ServerApp that runs `main` on its grid."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid)

    return app
