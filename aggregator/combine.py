"""One round's updates to one aggregate: gather, validate each as it comes, choose, combine.

No arithmetic touches an update before it is verified. A site whose update is
unusable is refused by name with a reason, and the round goes on with the rest;
too few left voids it. Opened updates live in memory only, for this call; what is
kept on disk is as the sites sealed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aggregator.cohort import SELECTED, Accepted, Cohort, Report, RoundStatus
from aggregator.federation import Federation
from aggregator.plan import damping
from aggregator.rules import RULES, tolerated_liars
from aggregator.sites import NO_ANSWER, Pace, Reply, Sites, is_out_of_reach
from aggregator.witness import Witness
from common.errors import RoundError, TransportError
from common.identity import SealingKey
from common.plan import RoundPlan, sign_plan
from common.update import UNFINISHED, Aggregate, LedgerHead, Refusal, SealedUpdate, Voided, open_update

_UPDATE_FIELDS = {
    "site": str,
    "plan_digest": str,
    "ledger_entry": str,
    "ledger_head": str,
    "ciphertext": bytes,
    "signature": bytes,
}

_AGAIN_S, _AGAIN_AT_MOST_S = 0.25, 30.0
"""A site that has not finished is asked again after this, then after twice as long, and so on."""

_TRIES = 3
"""In a row: of a site whose own disk failed in passing, and of a node before it counts as away."""

_LOOK_AROUND_EVERY_S = 1.0


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


def combine(current: OpenRound, sites: Sites, federation: Federation, witness: Witness) -> Aggregate | Voided:
    """Run one round against the sites that are there.

    Raises:
        TransportError: an answer, or the witness of the sites' ledgers, could not be stored.
    """
    cohort = gather(current, sites, federation, witness)
    witness.remember({federation.roster[site]: one.head for site, one in cohort.accepted.items() if one.head})
    updates = {site: cohort.accepted.pop(site).delta_D for site in sorted(cohort.accepted)}
    refusals = [cohort.refused[site] for site in sorted(cohort.refused)]
    return choose(current.plan, updates, refusals, federation, alert=current.alert)


def gather(current: OpenRound, sites: Sites, federation: Federation, witness: Witness) -> Cohort:
    """Ask every site for its finished update until it has one or the deadline is over; everyone is settled then.

    Messages are short: a site that has not finished says so and is asked again. What comes after the deadline is
    not taken. A site that is not there is waited for only while it could make up a quorum that is missing.
    """
    cohort = Cohort(current.plan.round, tuple(federation.roster), federation.quorum, current.excluded)
    for site in set(current.answered).intersection(cohort.unsettled):
        _settle(cohort, site, _verified_again(current.answered[site], site, current, federation))
    question = sites.question("train")
    collecting = _Collecting(current, sites, federation, witness)
    window_s = federation.collect_timeout_s if current.time_left_s is None else current.time_left_s
    ends, pace = time.monotonic() + window_s, Pace()
    told: RoundStatus | None = None
    while (left_s := ends - time.monotonic()) > 0:
        there = collecting.there()
        status = cohort.status(there=there, left_s=left_s)
        if told is None or replace(status, left_s=told.left_s) != told:
            current.report(told := status)
        if not there.intersection(cohort.unsettled) and (cohort.has_quorum or cohort.is_hopeless):
            break
        question.ask({site: collecting.request(site) for site in collecting.due(cohort) if site not in question.open})
        came = False
        for site, reply in question.answers():
            settled = collecting.read(site, reply)
            if settled is not None and site in cohort.unsettled:
                current.keep(site, settled.answer)
                _settle(cohort, site, settled.outcome)
                came = True
        pace.rest(came=came, at_most_s=left_s)
    for site in cohort.unsettled:
        cohort.refuse(collecting.late(site, window_s))
    return cohort


@dataclass(frozen=True)
class _Settled:
    """A site's part in a round: its answer as it is written down, and as it counts."""

    answer: SealedUpdate | Refusal
    outcome: Accepted | Refusal


class _Collecting:
    """What `gather` remembers of the sites that are not settled yet."""

    def __init__(self, current: OpenRound, sites: Sites, federation: Federation, witness: Witness) -> None:
        self._current = current
        self._sites = sites
        self._federation = federation
        self._witness = witness
        self._signatures = {
            one.digest: sign_plan(one, federation.key) for one in (current.plan, *(e.plan for e in current.earlier))
        }
        self._again_at = dict.fromkeys(federation.roster, 0.0)
        self._pauses = dict.fromkeys(federation.roster, _AGAIN_S)
        self._failures = dict.fromkeys(federation.roster, 0)
        self._said: dict[str, str] = {}
        self._away: set[str] = set()
        self._looked_at = time.monotonic()

    def there(self) -> frozenset[str]:
        """Sites that can be asked; those that come meanwhile among them."""
        if time.monotonic() - self._looked_at > _LOOK_AROUND_EVERY_S:
            self._looked_at = time.monotonic()
            self._sites.look_around()
        return frozenset(self._sites.names) - self._away

    def due(self, cohort: Cohort) -> list[str]:
        """Unsettled sites whose time to be asked has come."""
        now, present = time.monotonic(), set(self._sites.names)
        return [site for site in cohort.unsettled if site in present and self._again_at[site] <= now]

    def request(self, site: str) -> dict[str, Any]:
        """The plan, the earlier ones this site's update still counts for, and the last head of its ledger."""
        earlier = [one.plan for one in self._current.earlier if site not in one.used]
        return {
            "payload": self._current.plan.payload,
            "signature": self._signatures[self._current.plan.digest],
            "witness": self._witness.head(self._federation.roster[site]),
            "earlier_payloads": [plan.payload for plan in earlier],
            "earlier_signatures": [self._signatures[plan.digest] for plan in earlier],
        }

    def read(self, site: str, reply: Reply | Refusal) -> _Settled | None:
        """What a site answered; None where it will be asked again."""
        self._failures[site] = self._failures[site] + 1 if isinstance(reply, Refusal) else 0
        if is_out_of_reach(reply) and self._failures[site] >= _TRIES:
            self._away.add(site)
        else:
            self._away.discard(site)
        if isinstance(reply, Refusal):
            may_pass = reply.reason.startswith(TransportError.__name__) and self._failures[site] < _TRIES
            if may_pass or is_out_of_reach(reply):
                return self._ask_later(site, reply.reason)
            return _Settled(reply, reply)
        if dict(reply.fields) == UNFINISHED:
            return self._ask_later(site, "its update was not finished by the deadline")
        try:
            sealed = _sealed_update(reply.fields, site)
            return _Settled(sealed, validate(sealed, self._current, self._federation))
        except RoundError as error:
            refusal = Refusal(site, "validate", str(error))
            return _Settled(refusal, refusal)

    def late(self, site: str, window_s: float) -> Refusal:
        """Why a site was not waited for any longer."""
        if window_s <= 0:
            return Refusal(site, "train", "the deadline had passed")
        if site not in self._sites.names:
            return Refusal(site, "identify", self._sites.absence(site))
        return Refusal(site, "train", self._said.get(site, f"{NO_ANSWER} {window_s:.0f} s"))

    def _ask_later(self, site: str, said: str) -> _Settled | None:
        self._said[site] = said
        self._again_at[site] = time.monotonic() + self._pauses[site]
        self._pauses[site] = min(2 * self._pauses[site], _AGAIN_AT_MOST_S)
        return None


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
    plan: RoundPlan, updates: dict[str, np.ndarray], refusals: list[Refusal], federation: Federation, *, alert: bool
) -> Aggregate | Voided:
    """Combine by the federation's rule, or void where too few updates are left; takes the updates out of the dict."""
    rule = RULES[federation.rule]
    if len(updates) < federation.quorum:
        roster = len(federation.roster)
        reason = f"{len(updates)} usable updates of {roster} sites, at least {federation.quorum} are needed"
        return Voided(plan.digest, reason, tuple(refusals))
    names = sorted(updates)
    updates_ND = np.empty((len(names), updates[names[0]].size), np.float32)
    for row, name in enumerate(names):
        updates_ND[row] = updates.pop(name)  # never twice in memory
    weights_N = np.array([plan.weights[name] for name in names], np.float64)
    try:
        decision = rule.decide(updates_ND, weights_N, tolerated_liars(len(federation.roster)), alert=alert)
    except RoundError as error:
        return Voided(plan.digest, str(error), tuple(refusals))
    kept = {names[row] for row in decision.kept} if rule.tells else set(names)
    left_out = [Refusal(name, SELECTED, f"left out by {federation.rule}") for name in names if name not in kept]
    return Aggregate(plan.digest, decision.delta_D, tuple(sorted(kept)), (*refusals, *left_out), federation.rule)


def _settle(cohort: Cohort, site: str, outcome: Accepted | Refusal) -> None:
    if isinstance(outcome, Refusal):
        cohort.refuse(outcome)
    else:
        cohort.accept(site, outcome)


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
