"""One round's updates to one aggregate: gather, open, validate, choose, combine.

No arithmetic touches an update before it is verified. A site whose update is
unusable is refused by name with a reason, and the round goes on with the rest;
too few left voids it. Opened updates live in memory only, for this call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aggregator.federation import Federation
from aggregator.rules import RULES, tolerated_liars
from aggregator.sites import Reply, Sites
from common.errors import RoundError
from common.identity import SealingKey
from common.plan import RoundPlan, sign_plan
from common.update import Aggregate, Refusal, SealedUpdate, Voided, open_update

_UPDATE_FIELDS = {"site": str, "plan_digest": str, "ledger_entry": str, "ciphertext": bytes, "signature": bytes}


@dataclass(frozen=True)
class OpenRound:
    """A plan with what the aggregator keeps for itself: the key updates are sealed to."""

    plan: RoundPlan
    sealing_key: SealingKey
    shapes: Mapping[str, tuple[int, ...]]


def combine(current: OpenRound, sites: Sites, federation: Federation) -> Aggregate | Voided:
    """Run one round against the sites that are there."""
    replies = gather(current.plan, sites, federation)
    updates, refusals = validate(current, replies, federation)
    return choose(current.plan, updates, refusals, federation)


def gather(plan: RoundPlan, sites: Sites, federation: Federation) -> dict[str, Reply | Refusal]:
    """Ask every site for its finished update."""
    request = {"payload": plan.payload, "signature": sign_plan(plan, federation.key)}
    replies = sites.ask("train", dict.fromkeys(sites.names, request), timeout_s=federation.collect_timeout_s)
    absent = {site: Refusal(site, "identify", sites.absence(site)) for site in federation.roster if site not in replies}
    return {**replies, **absent}


def validate(
    current: OpenRound, replies: Mapping[str, Reply | Refusal], federation: Federation
) -> tuple[dict[str, np.ndarray], list[Refusal]]:
    """Flat updates of the sites that can be believed, and why the others cannot."""
    updates: dict[str, np.ndarray] = {}
    refusals: list[Refusal] = []
    for site, reply in sorted(replies.items()):
        if isinstance(reply, Refusal):
            refusals.append(reply)
            continue
        try:
            updates[site] = open_update(
                _sealed_update(reply.fields, site),
                current.plan,
                current.shapes,
                site_public=federation.roster[site],
                key=current.sealing_key,
            )
        except RoundError as error:
            refusals.append(Refusal(site, "validate", str(error)))
    return updates, refusals


def choose(
    plan: RoundPlan, updates: Mapping[str, np.ndarray], refusals: list[Refusal], federation: Federation
) -> Aggregate | Voided:
    """Combine by the federation's rule, or void where too few updates are left."""
    rule = RULES[federation.rule]
    tolerated = tolerated_liars(len(federation.roster))
    quorum = max(rule.minimum_updates(tolerated), len(federation.roster) // 2 + 1)
    if len(updates) < quorum:
        reason = f"{len(updates)} usable updates of {len(federation.roster)} sites, at least {quorum} are needed"
        return Voided(plan.digest, reason, tuple(refusals))
    names = sorted(updates)
    delta_D = rule.combine(
        np.stack([updates[name] for name in names]),
        np.array([plan.weights[name] for name in names], np.float64),
        tolerated,
    )
    return Aggregate(plan.digest, delta_D, tuple(names), tuple(refusals), federation.rule)


def _sealed_update(fields: Mapping[str, Any], site: str) -> SealedUpdate:
    """Read a reply's fields; raises RoundError where it is not an update of this site."""
    if set(fields) != set(_UPDATE_FIELDS):
        raise RoundError("the reply is not an update")
    for name, kind in _UPDATE_FIELDS.items():
        if not isinstance(fields[name], kind):
            raise RoundError(f"the reply's {name} is not {kind.__name__}")
    if fields["site"] != site:
        raise RoundError("the reply speaks for another site")
    return SealedUpdate(**fields)
