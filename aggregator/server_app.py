"""The main job, top to bottom: plan, combine, publish, watch the canary; then again.

Works over any Flower grid: in this process, over Ray, or over a SuperLink. Each step
is in the round log before the next one begins, so a process that was killed goes on
with the same round, the same plan and what it had received.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from aggregator.cohort import Report
from aggregator.combine import EarlierRound, OpenRound, combine, logger
from aggregator.federation import Federation
from aggregator.flower_sites import FlowerSites
from aggregator.golden import golden_request, paired_outcomes
from aggregator.plan import lag, make_plan
from aggregator.publish import publish
from aggregator.round_log import RoundLog, RoundRecord, Step
from aggregator.rules.vigilance import Evidence, Vigilance, advance
from aggregator.secure_round import combine_securely
from aggregator.server_optimizer import MomentsStore
from aggregator.sites import Sites, is_silence
from aggregator.witness import Witness
from common.adapter import Adapter
from common.errors import HeadwaterError, RoundError
from common.identity import SealingKey
from common.plan import RoundPlan
from common.secagg import MODES as SECURE_MODES
from common.telemetry import log_event
from common.update import Aggregate, Voided
from model_hub.hub import Hub
from model_hub.rollout import Stage
from model_hub.version import ModelVersion

_GOLDEN_TIMEOUT_S = 300.0

Wait = Callable[[str], None]
"""Called where the aggregator has nothing to do until the sites did something: `collect` or `canary`."""


Reference = Callable[[RoundPlan], np.ndarray]
"""What training for a plan changes on public data, without noise: flat float32 in the order of sorted PEFT names."""


class Combine(Protocol):
    """One way from the sites' updates to an aggregate."""

    def __call__(
        self, current: OpenRound, sites: Sites, federation: Federation, witness: Witness
    ) -> Aggregate | Voided: ...


COMBINE: dict[str, Combine] = {"sealed": combine, **dict.fromkeys(SECURE_MODES, combine_securely)}
"""By the names in `federation.AGGREGATIONS`."""


def run_rounds(
    grid: Grid,
    federation: Federation,
    hub: Hub,
    witness: Witness,
    log: RoundLog,
    *,
    clock: Callable[[], float],
    wait: Wait,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    on_status: Report = lambda status: None,
    reference: Reference | None = None,
) -> list[RoundRecord]:
    """Run all planned rounds that are left, or until they stop bearing fruit; what became of those run here.

    Args:
        grid: a Flower grid whose nodes run `edge_node.client_app`.
        witness: remembers the state of each site's privacy ledger.
        log: of this federation's rounds; a round that it has unfinished is finished first.
        clock: seconds since the epoch, for deadlines.
        wait: see `Wait`; in production it sleeps, in a simulation the users act.
        on_round: told of each round as it ends.
        on_status: told who has answered and who is awaited, as it changes.
        reference: tells updates that point against it; a round goes on without where it fails.
    """
    sites = FlowerSites.connect(grid, federation)
    records: list[RoundRecord] = []
    while True:
        if not log.is_unfinished(log.number):
            log.forget_keys(kept=_still_taken(federation, hub, log))
            settle_canary(sites, federation, hub, wait=wait)  # one that an earlier run left, or a person began
            if log.number >= federation.planned_rounds or is_fruitless(log.records(), federation.patience):
                return records
            wait("collect")
            sites.refresh()
            begin_round(federation, hub, log, now_s=clock())
        record = finish_round(
            sites, federation, hub, witness, log, clock=clock, wait=wait, on_status=on_status, reference=reference
        )
        records.append(record)
        on_round(record)


def begin_round(federation: Federation, hub: Hub, log: RoundLog, *, now_s: float) -> None:
    """A plan on the stable version, with a fresh key to seal updates to; in the log before anyone is shown it."""
    sealing_key = SealingKey(X25519PrivateKey.generate())
    stable = hub.stable
    adapter = hub.adapter(stable.id)
    number = log.number + 1
    log.open(
        make_plan(federation, stable, adapter, number=number, sealing_key=sealing_key, now_s=now_s),
        sealing_key,
        now_s=now_s,
    )


def finish_round(
    sites: FlowerSites,
    federation: Federation,
    hub: Hub,
    witness: Witness,
    log: RoundLog,
    *,
    clock: Callable[[], float],
    wait: Wait,
    on_status: Report,
    reference: Reference | None = None,
) -> RoundRecord:
    """Take the log's last round through the steps it has not made yet."""
    number = log.number
    plan = log.plan(number)
    obsolete = why_obsolete(plan, federation, hub)
    if log.step(number) is Step.OPEN:  # the plan may be out
        current = open_round(federation, hub, log, now_s=clock(), report=on_status, reference=reference)
        outcome = Voided(plan.digest, obsolete, ()) if obsolete else _combine(current, sites, federation, witness)
        if isinstance(outcome, Voided):
            log.void(number, outcome.reason, outcome.refusals)
        else:
            log.combined(number, outcome)
    if log.step(number) is Step.COMBINED:  # the aggregate is stored, a version may have been made of it
        version = hub.made_by(plan.digest)
        if version is None and obsolete:
            log.void(number, obsolete, log.record(number).refused)
        else:
            log.published(number, _published(version, plan, federation, hub, log).id)
    if log.step(number) is Step.PUBLISHED:  # its canary is undecided, or was when the log was last written
        made, participants = hub.made_by(plan.digest), log.record(number).participants
        assert made is not None
        watch_canary(sites, federation, hub, voters=participants, wait=wait)
        log.closed(number, hub.version(made.id).stage)
    return log.record(number)


def open_round(
    federation: Federation,
    hub: Hub,
    log: RoundLog,
    *,
    now_s: float,
    report: Report,
    reference: Reference | None = None,
) -> OpenRound:
    """The log's open round as `combine` takes it, with what an earlier process of this aggregator had received."""
    number = log.number
    plan, key = log.plan(number), log.sealing_key(number)
    assert key is not None  # it is erased only after the round
    shapes = phase_shapes(hub.adapter(plan.adapter_version), plan.lora_phase)
    return OpenRound(
        plan,
        key,
        shapes,
        time_left_s=plan.deadline_s - now_s,
        earlier=earlier_rounds(plan, federation, hub, log),
        answered=log.answers(number),
        excluded=log.suspended(),
        alert=vigilance(log.records()).alert(number),
        keep=lambda site, answer: log.keep(number, site, answer),
        report=report,
        past=log.choices(),
        keep_choice=lambda included: log.keep_choice(number, included),
        reference=lambda: _reference_of(plan, reference, size=sum(math.prod(shape) for shape in shapes.values())),
    )


def _reference_of(plan: RoundPlan, reference: Reference | None, *, size: int) -> np.ndarray | None:
    """The reference of a round, None where there is none; its training is another program's, and may fail anyhow."""
    if reference is None:
        return None
    try:
        change_D = reference(plan)
        if change_D.shape != (size,):
            raise RoundError(f"the reference has the shape {change_D.shape}, the updates have {size} values")
        if not np.isfinite(change_D).all() or not change_D.any():
            raise RoundError("public data teach nothing here")
    except (HeadwaterError, RuntimeError, ValueError, OSError, MemoryError) as error:
        reason = str(error) if isinstance(error, HeadwaterError) else type(error).__name__
        log_event(logger, "round without a reference", round=plan.round, reason=reason)
        return None
    return change_D


def vigilance(records: Sequence[RoundRecord]) -> Vigilance:
    """The state of alertness that finished rounds have left behind."""
    state = Vigilance()
    for record in records:
        evidence = Evidence(
            record.number,
            blamed=any(refusal.stage == "validate" for refusal in record.refused),
            gate_failed=record.stage is Stage.REJECTED,
            rolled_back=record.stage is Stage.ROLLED_BACK,
        )
        state = advance(state, evidence)
    return state


def earlier_rounds(plan: RoundPlan, federation: Federation, hub: Hub, log: RoundLog) -> tuple[EarlierRound, ...]:
    """Rounds on the plan's factor and an ancestor of its version, close enough for their updates to count now."""
    found = []
    for number in log.keyed_rounds():
        earlier, key = log.plan(number), log.sealing_key(number)
        behind = lag(earlier.adapter_version, stable=hub.version(plan.adapter_version), versions=hub.catalog.versions())
        same = _terms(earlier) == _terms(plan)
        if key is not None and same and behind is not None and behind <= federation.longest_lag:
            found.append(EarlierRound(earlier, key, behind, log.used(earlier.digest)))
    return tuple(found)


def why_obsolete(plan: RoundPlan, federation: Federation, hub: Hub) -> str:
    """Why a plan in the log cannot be gone on with, after a restart with other settings or a version rolled back."""
    made = hub.made_by(plan.digest)
    if (plan.federation, plan.roster_digest) != (federation.name, federation.roster_digest):
        return "the federation's roster changed while the round was open"
    if made is None and (plan.adapter_version, plan.adapter_digest) != (hub.stable.id, hub.stable.digest):
        return f"the stable version changed from {plan.adapter_version} to {hub.stable.id} while the round was open"
    return ""


def is_fruitless(records: Sequence[RoundRecord], patience: int) -> bool:
    """Whether the last `patience` rounds brought no promoted version; never where it is 0."""
    last = records[-patience:] if patience else []
    return bool(patience) and len(last) == patience and all(record.stage is not Stage.STABLE for record in last)


def phase_shapes(adapter: Adapter, phase: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of what one phase trains, in sorted order."""
    return {name: adapter.tensors[name].shape for name in adapter.names(phase)}


def settle_canary(sites: FlowerSites, federation: Federation, hub: Hub, *, wait: Wait) -> None:
    """Watch a canary that belongs to no round of the log, until it is decided."""
    if hub.canary is not None:
        watch_canary(sites, federation, hub, voters=hub.canary.lineage.participants or sites.names, wait=wait)


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


def _combine(current: OpenRound, sites: Sites, federation: Federation, witness: Witness) -> Aggregate | Voided:
    return COMBINE[federation.aggregation](current, sites, federation, witness)


def _published(
    begun: ModelVersion | None, plan: RoundPlan, federation: Federation, hub: Hub, log: RoundLog
) -> ModelVersion:
    """The version of a combined round, made at most once, with its canary begun where the gates passed."""
    if begun is None or begun.stage is Stage.CANDIDATE:
        return publish(
            log.aggregate(plan.round),
            plan,
            hub,
            balance=federation.balance,
            optimizer=federation.optimizer,
            moments=MomentsStore(log.folder / "moments"),
        )
    if begun.stage is Stage.GATED:
        hub.start_canary(begun)
    return hub.version(begun.id)


def _terms(plan: RoundPlan) -> tuple[object, ...]:
    """What two plans must share for the updates of one to count in the other's round."""
    return plan.federation, plan.base_digest, plan.lora_phase, plan.clip_norm, plan.roster_digest


def _still_taken(federation: Federation, hub: Hub, log: RoundLog) -> frozenset[int]:
    """Rounds whose updates a later round may still take."""
    versions = hub.catalog.versions()
    kept = set()
    for number in log.keyed_rounds():
        plan = log.plan(number)
        behind = lag(plan.adapter_version, stable=hub.stable, versions=versions)
        everyone = log.used(plan.digest) >= set(federation.roster)
        if behind is not None and behind <= federation.longest_lag and not everyone:
            kept.add(number)
    return frozenset(kept)
