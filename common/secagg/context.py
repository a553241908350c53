"""The terms of one secure round: every public number of it, derived by each party for itself.

A site derives them from its own policy, the roster it approved and the plan it
verified; what the server offers is compared with that and never used. The digest
of the terms and of the session enters every signature and every key, so parties
with different terms cannot finish a round together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from common.errors import ConfigError, TrustError
from common.plan import RoundPlan
from common.secagg.encoding import digest
from common.secagg.ring import LARGEST_WEIGHT, Ring
from common.secagg.rotation import Rotation
from common.secagg.sketch import LARGEST_SHARE, TABLES, buckets_for

PROTOCOL = "headwater-secagg-2"
SUM_ONLY, SKETCH = "secagg", "secagg_sketch"
MODES = (SUM_ONLY, SKETCH)
MINIMUM_SITES = {SUM_ONLY: 3, SKETCH: 4}
MINIMUM_ORGANISATIONS = 3

LARGEST_ROUNDING = 0.034
"""Of the clip norm, that rounding may move one update by where a direction is allowed: as much as 16 bits may."""

_COLLUDERS_WITHOUT_ROOM = 8
"""Colluders' numbers may be false by 2³² steps in all. With so many each is false by half a clip norm at least, which
its sketch contradicts (`common.secagg.selection.Along`); for more of them the ring has as much more room."""

LOCAL_NOISE = "local"
"""Every update is private by its own site's noise. Noise that is only enough in the sum forbids opening a sketch."""


@dataclass(frozen=True)
class Member:
    """One site of the roster, as a customer has approved it.

    Attributes:
        public: raw Ed25519 key.
        organisation: who runs it; the sites of one organisation count as colluding.
        weight: contract weight, 1, 2 or 4.
        run_by_vendor: 1 where whoever runs the aggregator also runs this site.
    """

    name: str
    public: bytes
    organisation: str
    weight: int = 1
    run_by_vendor: int = 0


@dataclass(frozen=True)
class Limits:
    """How far the server may choose; each site holds it to its own.

    Attributes:
        distinct_sets: different sets of included sites within `window` rounds.
        window: rounds; within each, a set may only shrink.
        left_out: rounds of `window` that a site lets its update be dropped or excluded before it stops uploading.
        sketched_share: of an update's dimensions, over all rounds, that a site lets be projected.
        directions: of the server's own choice, along which it may look at an update: 0 or 1.
    """

    distinct_sets: int = 3
    window: int = 10
    left_out: int = 3
    sketched_share: float = 0.05
    directions: int = 0


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Terms:
    """Attributes:
    snapshot: of the hub, that the adapter was taken from.
    dimension: parameters of one update.
    members: sorted by name.
    colluders: f, beside whom the server may stand.
    quorum: t, sites that must sign the same list and the same choice.
    total_weight: of all members.
    buckets: of each of the sketch's tables; 0 without a sketch.
    exclusions: uploads that the server may reject.
    word_bits: of the ring, 32 or 16.
    """

    protocol: str
    mode: str
    noise: str
    federation: str
    round: int
    planned_rounds: int
    plan_digest: str
    base_digest: str
    adapter_digest: str
    snapshot: str
    dimension: int
    clip_norm: float
    members: tuple[Member, ...]
    colluders: int
    quorum: int
    total_weight: int
    buckets: int
    exclusions: int
    word_bits: int
    limits: Limits

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    @property
    def ring(self) -> Ring:
        if self.word_bits == 32:
            heaviest = max(member.weight for member in self.members)
            room = max(1.0, self.colluders / _COLLUDERS_WITHOUT_ROOM)
            longest = heaviest * math.sqrt(self.dimension) * room if self.limits.directions else 0.0  # in either mode
            return Ring(self.clip_norm, self.total_weight, longest=longest)
        rotation = Rotation(digest(_RotationSeed(self.protocol, self.plan_digest)), self.dimension)
        return Ring(self.clip_norm, self.total_weight, rotation)

    @property
    def directions(self) -> int:
        """Words of a sketch that the server may choose the direction of; none without a sketch."""
        return self.limits.directions if self.mode == SKETCH else 0

    @property
    def sketched_share(self) -> float:
        """Words of this round's sketch per coordinate."""
        return (TABLES * self.buckets + self.directions) / self.dimension

    @property
    def minimum_included(self) -> int:
        return fewest_summed(len(self.members))

    def member(self, name: str) -> Member:
        """The member of that name; raises TrustError where there is none."""
        if name not in self._places:
            raise TrustError(f"{name!r} is not on the roster")
        return self.members[self._places[name]]

    def point(self, name: str) -> int:
        """Where a member's shares lie: its place on the roster, from 1."""
        return self._places[name] + 1

    def context(self, session: bytes) -> bytes:
        """What binds a signature or a key to these terms and this session, 32 bytes."""
        return digest(_Session(digest(self), session))


@dataclass(frozen=True)
class _RotationSeed:
    """The plan and nothing of the session: words that are sent in a second session are the same."""

    protocol: str
    plan_digest: str


@dataclass(frozen=True)
class _Session:
    terms: bytes
    session: bytes


def colluders_of(sites: int) -> int:
    """f = ⌊(n − 1) / 3⌋."""
    return (sites - 1) // 3


def quorum_of(sites: int) -> int:
    """t = ⌊(n + f) / 2⌋ + 1: two quorums share an honest site."""
    return (sites + colluders_of(sites)) // 2 + 1


def fewest_summed(sites: int) -> int:
    """Updates of so many sites that a sum must hold."""
    return max(quorum_of(sites), MINIMUM_ORGANISATIONS)


def derive_terms(
    plan: RoundPlan,
    *,
    mode: str,
    members: Iterable[Member],
    dimension: int,
    snapshot: str,
    limits: Limits,
    word_bits: int = 32,
) -> Terms:
    """The terms of one round; the server and every site call this, each with what it knows itself.

    Raises:
        ConfigError: a federation like this cannot aggregate securely.
        TrustError: the plan is not for these members.
    """
    roster = tuple(sorted(members, key=lambda member: member.name))
    sites = len(roster)
    terms = Terms(
        protocol=PROTOCOL,
        mode=mode,
        noise=LOCAL_NOISE,
        federation=plan.federation,
        round=plan.round,
        planned_rounds=plan.planned_rounds,
        plan_digest=plan.digest,
        base_digest=plan.base_digest,
        adapter_digest=plan.adapter_digest,
        snapshot=snapshot,
        dimension=dimension,
        clip_norm=plan.clip_norm,
        members=roster,
        colluders=colluders_of(sites),
        quorum=quorum_of(sites),
        total_weight=sum(member.weight for member in roster),
        buckets=buckets_for(dimension, directions=limits.directions) if mode == SKETCH else 0,
        exclusions=(sites - 1) // 4 if mode == SKETCH else 0,
        word_bits=word_bits,
        limits=limits,
    )
    if plan.weights != {member.name: member.weight for member in roster}:
        raise TrustError(
            "the plan's sites and weights are not those of the approved roster",
            public="the plan's sites and weights are not those of the roster this site approved",
        )
    check_terms(terms)
    return terms


def check_terms(terms: Terms) -> None:
    """Raise ConfigError where no honest party would aggregate on these terms."""
    members, sites = terms.members, len(terms.members)
    organisations = [member.organisation for member in members]
    largest = max(Counter(organisations).values(), default=0)
    needed = MINIMUM_SITES.get(terms.mode, 0)
    share = max((member.weight for member in members), default=0) / max(terms.total_weight, 1)
    for holds, reason in (
        (terms.mode in MODES, f"unknown aggregation mode {terms.mode!r}; known: {', '.join(MODES)}"),
        (terms.noise == LOCAL_NOISE, "updates must be private by their own noise"),
        (terms.limits.directions in (0, 1), "at most one direction may be chosen"),
        (sites >= needed, f"{terms.mode} needs at least {needed} sites, got {sites}"),
        (len(set(terms.names)) == len({m.public for m in members}) == sites, "two sites share a name or a key"),
        (all(len(m.public) == 32 and m.name and m.organisation for m in members), "a site has no name, key or owner"),
        (len(set(organisations)) >= MINIMUM_ORGANISATIONS, f"fewer than {MINIMUM_ORGANISATIONS} organisations"),
        (largest <= max(1, terms.colluders), f"one organisation runs {largest} sites of {sites}"),
        (
            sum(m.run_by_vendor for m in members) <= terms.colluders,
            f"the vendor runs more than {terms.colluders} of {sites} sites",
        ),
        ({m.weight for m in members} <= {1, 2, 4}, "weights must be 1, 2 or 4"),
        (share <= max(0.25, 1 / max(sites, 1)) + 1e-9, f"one site would have {share:.0%} of the weight"),
        (terms.dimension >= 1 and math.isfinite(terms.clip_norm) and terms.clip_norm > 0, "no dimension or no clip"),
        (
            terms.mode != SKETCH or (terms.buckets > 0 and terms.sketched_share <= LARGEST_SHARE),
            f"an update of {terms.dimension} parameters is too small for a sketch; use {SUM_ONLY}",
        ),
    ):
        if not holds:
            raise ConfigError(reason, public=reason)
    rounding = math.sqrt(terms.dimension) / (2 * terms.ring.scale * terms.clip_norm)
    if terms.limits.directions and rounding > LARGEST_ROUNDING:
        moved = f"rounding would move an update by {rounding:.1%} of the clip"
        reason = f"{terms.dimension} parameters are too many for a direction: {moved}"
        raise ConfigError(reason, public=reason)
    check_word_bits(terms.word_bits, mode=terms.mode, total_weight=terms.total_weight)


def check_word_bits(bits: int, *, mode: str, total_weight: int) -> None:
    """Raise ConfigError where words of so many bits do not carry this mode, or a sum of this weight."""
    most = LARGEST_WEIGHT.get(bits, 0)
    for holds, reason in (
        (bits in LARGEST_WEIGHT, f"words of {bits} bits; known: {', '.join(map(str, sorted(LARGEST_WEIGHT)))}"),
        (bits == 32 or mode == SUM_ONLY, f"words of {bits} bits carry mode {SUM_ONLY} only, not {mode}; use 32"),
        (
            mode not in MODES or total_weight <= most,
            f"words of {bits} bits carry weights up to {most} in all, not {total_weight}",
        ),
    ):
        if not holds:
            raise ConfigError(reason, public=reason)


def compare(own: Terms, offered: Terms) -> None:
    """Raise TrustError naming the first field in which the server's terms are not the site's own."""
    for field in fields(Terms):
        if getattr(own, field.name) != getattr(offered, field.name):
            reason = f"the server's {field.name} is not the one this site derives"
            raise TrustError(reason, public=reason)


def check_included(terms: Terms, included: Sequence[str]) -> None:
    """Raise TrustError unless so many sites may be summed.

    What `check_terms` says of organisations carries over: t sites, of which none runs more than f, are of three
    organisations at least, and of two beside any f colluding sites.
    """
    if len(included) < terms.minimum_included:
        reason = f"{len(included)} sites are too few: at least {terms.minimum_included}"
        raise TrustError(reason, public=reason)
