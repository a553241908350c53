"""One round's updates to one aggregate: gather, validate each as it comes, choose, combine.

No arithmetic touches an update before it is verified. A site whose update is
unusable is refused by name with a reason, and the round goes on with the rest;
too few left voids it. Opened updates live in memory only, for this call; what is
kept on disk is as the sites sealed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aggregator.cohort import SELECTED, Accepted, Cohort, Report
from aggregator.federation import Federation
from aggregator.gathering import gather
from aggregator.plan import damping
from aggregator.rules import RULES, tolerated_liars
from aggregator.sites import Reply, Sites
from aggregator.witness import Witness
from common.errors import RoundError
from common.identity import SealingKey
from common.outliers import against_reference
from common.plan import RoundPlan, sign_plan
from common.telemetry import log_event
from common.update import Aggregate, LedgerHead, Refusal, SealedUpdate, Voided, open_update

_UPDATE_FIELDS = {
    "site": str,
    "plan_digest": str,
    "ledger_entry": str,
    "ledger_head": str,
    "ciphertext": bytes,
    "signature": bytes,
}

logger = logging.getLogger("headwater.aggregator")

BESIDE_REFERENCE = "+reference"
"""After the name of a rule: updates were held against a public reference that was believed."""


@dataclass(frozen=True)
class EarlierRound:
    """A round whose updates still count where the site's was not used: late, or of a round that was voided.

    Attributes:
        lag: versions it is behind.
        used: sites whose update for it is in an aggregate already.
    """

    plan: RoundPlan
    sealing_key: SealingKey
    lag: int
    used: frozenset[str]


@dataclass(frozen=True)
class OpenRound:
    """A plan with what the aggregator keeps for itself.

    Attributes:
        sealing_key: what updates are sealed to.
        time_left_s: to the plan's deadline; None where the round has just begun.
        earlier: rounds on the same factor whose updates are still taken.
        answered: what sites answered an earlier process of this aggregator in this round.
        excluded: sites that take no part, and why.
        alert: whether rules leave out as many updates as they tolerate; see `aggregator.rules.vigilance`.
        keep: writes an answer down; called once for each site, before it counts.
        report: is told of the round as it goes.
        past: whom earlier secure rounds summed, by round.
        keep_choice: writes down whom this one is about to sum, before the sites are told.
        reference: what training for the plan changes on public data, without noise; None where there is none. Asked
            after the updates are in.
    """

    plan: RoundPlan
    sealing_key: SealingKey
    shapes: Mapping[str, tuple[int, ...]]
    time_left_s: float | None = None
    earlier: tuple[EarlierRound, ...] = ()
    answered: Mapping[str, SealedUpdate | Refusal] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    alert: bool = False
    keep: Callable[[str, SealedUpdate | Refusal], None] = lambda site, answer: None
    report: Report = lambda status: None
    past: Mapping[int, frozenset[str]] = field(default_factory=dict)
    keep_choice: Callable[[tuple[str, ...]], None] = lambda included: None
    reference: Callable[[], np.ndarray | None] = lambda: None


def combine(current: OpenRound, sites: Sites, federation: Federation, witness: Witness) -> Aggregate | Voided:
    """Run one round against the sites that are there.

    Raises:
        TransportError: an answer, or the witness of the sites' ledgers, could not be stored.
    """
    cohort = Cohort(current.plan.round, tuple(federation.roster), federation.quorum, current.excluded)
    for site in set(current.answered).intersection(cohort.unsettled):
        cohort.settle(site, _verified_again(current.answered[site], site, current, federation))
    gather(
        cohort,
        sites,
        "train",
        request=requests(current, federation, witness),
        settle=lambda site, reply: settle(site, reply, current, federation),
        window_s=federation.collect_timeout_s if current.time_left_s is None else current.time_left_s,
        report=current.report,
    )
    witness.remember({federation.roster[site]: one.head for site, one in cohort.accepted.items() if one.head})
    updates = {site: cohort.accepted.pop(site).delta_D for site in sorted(cohort.accepted)}
    refusals = [cohort.refused[site] for site in sorted(cohort.refused)]
    spare = len(updates) > federation.quorum  # else nothing can be left out
    reference_D = current.reference() if spare else None
    return choose(current.plan, updates, refusals, federation, alert=current.alert, reference_D=reference_D)


def requests(current: OpenRound, federation: Federation, witness: Witness) -> Callable[[str], dict[str, Any]]:
    """For each site: the plan, the earlier ones its update still counts for, and the last head of its ledger."""
    plans = (current.plan, *(one.plan for one in current.earlier))
    signatures = {plan.digest: sign_plan(plan, federation.key) for plan in plans}

    def request(site: str) -> dict[str, Any]:
        earlier = [one.plan for one in current.earlier if site not in one.used]
        return {
            "payload": current.plan.payload,
            "signature": signatures[current.plan.digest],
            "witness": witness.head(federation.roster[site]),
            "earlier_payloads": [plan.payload for plan in earlier],
            "earlier_signatures": [signatures[plan.digest] for plan in earlier],
        }

    return request


def settle(site: str, reply: Reply | Refusal, current: OpenRound, federation: Federation) -> Accepted | Refusal:
    """What a site's answer counts as; it is written down before that."""
    answer: SealedUpdate | Refusal
    outcome: Accepted | Refusal
    if isinstance(reply, Refusal):
        answer = outcome = reply
    else:
        try:
            answer = _sealed_update(reply.fields, site)
            outcome = validate(answer, current, federation)
        except RoundError as error:
            answer = outcome = Refusal(site, "validate", str(error))
    current.keep(site, answer)
    return outcome


def validate(sealed: SealedUpdate, current: OpenRound, federation: Federation) -> Accepted:
    """One site's update: signed by it, made for this round or an unused earlier one, and usable.

    Raises:
        RoundError: anything about it is wrong.
    """
    public = federation.roster[sealed.site]
    plan, key, weight = current.plan, current.sealing_key, 1.0
    for earlier in current.earlier:
        if sealed.plan_digest == earlier.plan.digest:
            if sealed.site in earlier.used:
                raise RoundError("it was counted in an earlier round")
            plan, key, weight = earlier.plan, earlier.sealing_key, damping(earlier.lag)
    delta_D = open_update(sealed, plan, current.shapes, site_public=public, key=key)
    if weight != 1.0:
        delta_D *= np.float32(weight)
    return Accepted(delta_D, LedgerHead.parse(sealed.ledger_head) if sealed.ledger_head else None)


def choose(
    plan: RoundPlan,
    updates: dict[str, np.ndarray],
    refusals: list[Refusal],
    federation: Federation,
    *,
    alert: bool,
    reference_D: np.ndarray | None = None,
) -> Aggregate | Voided:
    """Combine by the federation's rule, or void where too few updates are left; takes the updates out of the dict.

    Those that point against the reference are left out first, as many as are tolerated and the quorum can do without.
    """
    rule, tolerated = RULES[federation.rule], tolerated_liars(len(federation.roster))
    if len(updates) < federation.quorum:
        roster = len(federation.roster)
        reason = f"{len(updates)} usable updates of {roster} sites, at least {federation.quorum} are needed"
        return Voided(plan.digest, reason, tuple(refusals))
    against = None if reference_D is None else _against(updates, reference_D, liars=tolerated)
    if reference_D is not None and against is None:
        log_event(logger, "reference not believed", round=plan.round)
    out = (against or [])[: min(tolerated, len(updates) - federation.quorum)]
    for name in out:
        del updates[name]
        refusals = [*refusals, Refusal(name, SELECTED, "it points against what public data teach")]
    names = sorted(updates)
    updates_ND = np.empty((len(names), updates[names[0]].size), np.float32)
    for row, name in enumerate(names):
        updates_ND[row] = updates.pop(name)  # never twice in memory
    weights_N = np.array([plan.weights[name] for name in names], np.float64)
    try:
        # one budget for what is held against a site
        decision = rule.decide(updates_ND, weights_N, tolerated, alert=alert, budget=tolerated - len(out))
    except RoundError as error:
        return Voided(plan.digest, str(error), tuple(refusals))
    kept = {names[row] for row in decision.kept} if rule.tells else set(names)
    left_out = [Refusal(name, SELECTED, f"left out by {federation.rule}") for name in names if name not in kept]
    how = federation.rule + (BESIDE_REFERENCE if against is not None else "")
    return Aggregate(plan.digest, decision.delta_D, tuple(sorted(kept)), (*refusals, *left_out), how)


def _against(updates: Mapping[str, np.ndarray], reference_D: np.ndarray, *, liars: int) -> list[str] | None:
    """Sites whose updates point against the reference, the clearest first; None where it is not believed."""
    if not reference_D.any():
        return None
    names, ahead_D = sorted(updates), reference_D / np.linalg.norm(reference_D)
    lengths_N = np.array([np.linalg.norm(updates[name]) for name in names])
    along_N = np.array([np.dot(updates[name], ahead_D) for name in names])
    cosines_N = np.divide(along_N, lengths_N, out=np.zeros(len(names)), where=lengths_N > 0)
    rows_R = against_reference(cosines_N, len(ahead_D), liars=liars)
    return None if rows_R is None else [names[row] for row in rows_R]


def _verified_again(
    answer: SealedUpdate | Refusal, site: str, current: OpenRound, federation: Federation
) -> Accepted | Refusal:
    """An answer that was written down before, verified again."""
    if isinstance(answer, Refusal):
        return answer
    try:
        return validate(answer, current, federation)
    except RoundError as error:
        return Refusal(site, "validate", str(error))


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
