"""Who takes part in a round: what each site of the roster has said so far, and who is still awaited.

Pure bookkeeping: each site counts once, by its first answer that settles it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from common.update import LedgerHead, Refusal

LIED = "lied"
"""Stage of a refusal for a lie that signatures prove; the site takes no part until a person readmits it."""

SELECTED = "select"
"""Stage of a refusal by a rule that left the update out; it proves nothing."""

SUSPENDED = "suspended"
"""Stage of a refusal of a site that was not asked."""

EXCLUDING_STAGES = frozenset({"validate", SELECTED, LIED})
"""Stages whose refusals are held against a site: what it sent was unusable, or the selection dropped it."""

EXCLUSIONS, WITHIN_ROUNDS = 3, 10
"""So many exclusions within so many rounds it was asked in call for a human; the site takes no part until then."""


@dataclass(frozen=True)
class RoundStatus:
    """What a round is doing, for people who watch it.

    Attributes:
        step: what a secure session waits for; empty while updates are gathered.
        received: sites whose update, or answer in this step, is in hand.
        awaited: sites that are there and have not finished.
        absent: sites that are not there, or out of reach.
        needed: of those, without which there is no result.
        left_s: to the deadline.
    """

    number: int
    received: tuple[str, ...]
    refused: tuple[Refusal, ...]
    awaited: tuple[str, ...]
    absent: tuple[str, ...]
    needed: int
    left_s: float
    step: str = ""

    def __str__(self) -> str:
        what = f", {self.step}: {len(self.received)} answers" if self.step else f": {len(self.received)} updates"
        text = f"round {self.number}{what}, {self.needed} needed"
        if self.refused:
            text += f", {len(self.refused)} refused"
        waiting = [(", waiting for ", self.awaited), (", not there: ", self.absent)]
        return text + "".join(lead + _named(sites) for lead, sites in waiting if sites)


Report = Callable[[RoundStatus], None]


def _named(sites: tuple[str, ...], *, at_most: int = 5) -> str:
    more = len(sites) - at_most
    return ", ".join(sites[:at_most]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, eq=False)
class Accepted:
    """One site's update, verified.

    Attributes:
        delta_D: flat float32, damped where it is stale.
        head: of the ledger that paid for it; None where nothing was charged.
    """

    delta_D: np.ndarray
    head: LedgerHead | None


@dataclass
class Cohort:
    """The roster of one round.

    Args:
        excluded: sites that take no part, and why.
    """

    number: int
    roster: tuple[str, ...]
    needed: int
    excluded: Mapping[str, str] = field(default_factory=dict)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for site in self.roster:
            if site in self.excluded:
                self.refused[site] = Refusal(site, SUSPENDED, self.excluded[site])

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Sites that may still hand over an update."""
        return tuple(site for site in self.roster if site not in self.accepted and site not in self.refused)

    @property
    def has_quorum(self) -> bool:
        return len(self.accepted) >= self.needed

    @property
    def is_hopeless(self) -> bool:
        """Whether there are too few updates even if all come that can."""
        return len(self.accepted) + len(self.unsettled) < self.needed

    def settle(self, site: str, outcome: Accepted | Refusal) -> None:
        """`accept` or `refuse`, whichever it is."""
        if isinstance(outcome, Refusal):
            self.refuse(outcome)
        else:
            self.accept(site, outcome)

    def accept(self, site: str, update: Accepted) -> None:
        """Count a site's update; raises ValueError where the site is settled, so nobody counts twice."""
        self._require_unsettled(site)
        self.accepted[site] = update

    def refuse(self, refusal: Refusal) -> None:
        """Go on without a site; raises ValueError where it is settled."""
        self._require_unsettled(refusal.site)
        self.refused[refusal.site] = refusal

    def status(self, *, there: frozenset[str], left_s: float) -> RoundStatus:
        """As it is now; `there` are the sites that can be asked."""
        return RoundStatus(
            self.number,
            tuple(sorted(self.accepted)),
            tuple(self.refused[site] for site in sorted(self.refused)),
            tuple(site for site in self.unsettled if site in there),
            tuple(site for site in self.unsettled if site not in there),
            self.needed,
            left_s,
        )

    def _require_unsettled(self, site: str) -> None:
        if site not in self.roster or site in self.accepted or site in self.refused:
            raise ValueError(f"{site} is settled in round {self.number}, or not of its roster")


def suspension(
    exclusions: Mapping[int, Refusal], *, number: int, readmitted_after: int = 0, out: Collection[int] = ()
) -> str | None:
    """Why a site takes no part in round `number`, or None.

    Exclusion is no proof of malice: a site with unusual data may be dropped by a selection. So a human looks.

    Args:
        exclusions: of one site, by round.
        readmitted_after: the last round before an operator let the site in again; earlier ones are forgiven.
        out: rounds in which the site was not asked, as after an exclusion in a secure mode; they do not count.
    """
    counted = sorted(r for r in exclusions if readmitted_after < r < number)
    for lie in (exclusions[r] for r in counted if exclusions[r].stage == LIED):
        return f"it lied: {lie.reason}; an operator has to look and readmit it"
    for last in range(EXCLUSIONS - 1, len(counted)):
        first = counted[last - EXCLUSIONS + 1]
        if counted[last] - first - sum(first < r < counted[last] for r in out) < WITHIN_ROUNDS:
            rounds = ", ".join(map(str, counted[last - EXCLUSIONS + 1 : last + 1]))
            reason = exclusions[counted[last]].reason
            return f"excluded in rounds {rounds} ({reason}); an operator has to look and readmit it"
    return None


def suspensions(
    exclusions: Mapping[str, Mapping[int, Refusal]],
    *,
    number: int,
    readmitted_after: Mapping[str, int],
    selected_at_most: int,
    out: Mapping[str, Collection[int]] | None = None,
) -> dict[str, str]:
    """Sites that take no part in round `number`, and why.

    A selection is sometimes wrong, and in the alert state it leaves somebody out in every round. So no more sites than
    `selected_at_most` are suspended for that alone, those it left out most often; else it would end the federation.
    """
    reasons: dict[str, str] = {}
    times_selected: dict[str, int] = {}
    for site, refusals in exclusions.items():
        since, away = readmitted_after.get(site, 0), (out or {}).get(site, ())
        reason = suspension(refusals, number=number, readmitted_after=since, out=away)
        if reason is None:
            continue
        reasons[site] = reason
        proven = {r: refusal for r, refusal in refusals.items() if refusal.stage != SELECTED}
        if suspension(proven, number=number, readmitted_after=since, out=away) is None:
            times_selected[site] = sum(since < r < number for r in refusals)
    most_often = sorted(times_selected, key=lambda site: (-times_selected[site], site))
    return {site: reason for site, reason in reasons.items() if site not in most_often[selected_at_most:]}
