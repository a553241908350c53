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
from aggregator.witness import Witness
from common.errors import RoundError
from common.identity import SealingKey
from common.plan import RoundPlan, sign_plan
from common.update import Aggregate, LedgerHead, Refusal, SealedUpdate, Voided, open_update

_UPDATE_FIELDS = {
    "site": str,
    "plan_digest": str,
    "ledger_entry": str,
    "ledger_head": str,
    "ciphertext": bytes,
    "signature": bytes,
}


@dataclass(frozen=True)
class OpenRound:
    """A plan with what the aggregator keeps for itself: the key updates are sealed to."""

    plan: RoundPlan
    sealing_key: SealingKey
    shapes: Mapping[str, tuple[int, ...]]


def combine(current: OpenRound, sites: Sites, federation: Federation, witness: Witness) -> Aggregate | Voided:
    """Run one round against the sites that are there.

    Raises:
        TransportError: the witness of the sites' ledgers could not be stored.
    """
    replies = gather(current.plan, sites, federation, witness)
    updates, refusals = validate(current, replies, federation, witness)
    return choose(current.plan, updates, refusals, federation)


def gather(plan: RoundPlan, sites: Sites, federation: Federation, witness: Witness) -> dict[str, Reply | Refusal]:
    """Ask every site for its finished update, and show it the last head of its ledger."""
    signature = sign_plan(plan, federation.key)
    requests = {
        site: {"payload": plan.payload, "signature": signature, "witness": witness.head(federation.roster[site])}
        for site in sites.names
    }
    replies = sites.ask("train", requests, timeout_s=federation.collect_timeout_s)
    absent = {site: Refusal(site, "identify", sites.absence(site)) for site in federation.roster if site not in replies}
    return {**replies, **absent}


def validate(
    current: OpenRound, replies: Mapping[str, Reply | Refusal], federation: Federation, witness: Witness
) -> tuple[dict[str, np.ndarray], list[Refusal]]:
    """Flat updates of the sites that can be believed, and why the others cannot; remembers the former's ledgers."""
    heads: dict[bytes, LedgerHead] = {}
    updates: dict[str, np.ndarray] = {}
    refusals: list[Refusal] = []
    for site, reply in sorted(replies.items()):
        if isinstance(reply, Refusal):
            refusals.append(reply)
            continue
        public = federation.roster[site]
        try:
            sealed = _sealed_update(reply.fields, site)
            updates[site] = open_update(
                sealed, current.plan, current.shapes, site_public=public, key=current.sealing_key
            )
            if sealed.ledger_head:
                heads[public] = LedgerHead.parse(sealed.ledger_head)
        except RoundError as error:
            refusals.append(Refusal(site, "validate", str(error)))
    witness.remember(heads)
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
