"""Asking the sites of a round until each has answered or the deadline is over: one loop for every kind of round.

Messages are short: a site that has not finished says so and is asked again. What
comes after the deadline is not taken. A site that is not there is waited for only
while it could make up a quorum that is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from aggregator.cohort import Accepted, Cohort, Report, RoundStatus
from aggregator.sites import NO_ANSWER, Pace, Reply, Sites, is_out_of_reach
from common.errors import TransportError
from common.update import UNFINISHED, Refusal

_AGAIN_S, _AGAIN_AT_MOST_S = 0.25, 30.0
"""A site that has not finished is asked again after this, then after twice as long, and so on."""

_TRIES = 3
"""In a row: of a site whose own disk failed in passing, and of a node before it counts as away."""

_LOOK_AROUND_EVERY_S = 1.0


def gather(
    cohort: Cohort,
    sites: Sites,
    kind: str,
    *,
    request: Callable[[str], Mapping[str, Any]],
    settle: Callable[[str, Reply | Refusal], Accepted | Refusal],
    window_s: float,
    report: Report,
) -> None:
    """Ask every unsettled site; everyone is settled then.

    Args:
        request: what a site is asked.
        settle: what an answer counts as, and writes it down; called once for each site that answers in time.
        window_s: to the deadline.
        report: is told of the round whenever it changes.
    """
    question, patience, pace = sites.question(kind), _Patience(cohort.roster, sites), Pace()
    ends = time.monotonic() + window_s
    told: RoundStatus | None = None
    while (left_s := ends - time.monotonic()) > 0:
        there = patience.there()
        status = cohort.status(there=there, left_s=left_s)
        if told is None or replace(status, left_s=told.left_s) != told:
            report(told := status)
        if not there.intersection(cohort.unsettled) and (cohort.has_quorum or cohort.is_hopeless):
            break
        busy = question.open
        due = [site for site in patience.due(cohort.unsettled) if site not in busy]
        question.ask({site: request(site) for site in due})
        came = False
        for site, reply in question.answers():
            if site in cohort.unsettled and patience.is_final(site, reply):
                cohort.settle(site, settle(site, reply))
                came = True
        pace.rest(came=came, at_most_s=left_s)
    for site in cohort.unsettled:
        cohort.refuse(patience.late(site, window_s))


class _Patience:
    """What is remembered of the sites that are not settled: when to ask again, who is away, what they said."""

    def __init__(self, roster: Iterable[str], sites: Sites) -> None:
        self._sites = sites
        self._again_at = dict.fromkeys(roster, 0.0)
        self._pauses = dict.fromkeys(self._again_at, _AGAIN_S)
        self._failures = dict.fromkeys(self._again_at, 0)
        self._said: dict[str, str] = {}
        self._away: set[str] = set()
        self._looked_at = time.monotonic()

    def there(self) -> frozenset[str]:
        """Sites that can be asked; those that come meanwhile among them."""
        if time.monotonic() - self._looked_at > _LOOK_AROUND_EVERY_S:
            self._looked_at = time.monotonic()
            self._sites.look_around()
        return frozenset(self._sites.names) - self._away

    def due(self, unsettled: Iterable[str]) -> list[str]:
        """Those whose time to be asked has come, the ones that are away among them."""
        now, present = time.monotonic(), set(self._sites.names)
        return [site for site in unsettled if site in present and self._again_at[site] <= now]

    def is_final(self, site: str, reply: Reply | Refusal) -> bool:
        """Whether this is a site's answer; otherwise it is asked again."""
        self._failures[site] = self._failures[site] + 1 if isinstance(reply, Refusal) else 0
        if is_out_of_reach(reply) and self._failures[site] >= _TRIES:
            self._away.add(site)
        else:
            self._away.discard(site)
        if isinstance(reply, Refusal):
            may_pass = reply.reason.startswith(TransportError.__name__) and self._failures[site] < _TRIES
            if not may_pass and not is_out_of_reach(reply):
                return True
            self._said[site] = reply.reason
        elif dict(reply.fields) == UNFINISHED:
            self._said[site] = "its update was not finished by the deadline"
        else:
            return True
        self._again_at[site] = time.monotonic() + self._pauses[site]
        self._pauses[site] = min(2 * self._pauses[site], _AGAIN_AT_MOST_S)
        return False

    def late(self, site: str, window_s: float) -> Refusal:
        """Why a site was not waited for any longer."""
        if window_s <= 0:
            return Refusal(site, "train", "the deadline had passed")
        if site not in self._sites.names:
            return Refusal(site, "identify", self._sites.absence(site))
        return Refusal(site, "train", self._said.get(site, f"{NO_ANSWER} {window_s:.0f} s"))
