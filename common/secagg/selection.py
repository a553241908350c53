"""Which masked uploads to sum, judged by their sketches alone.

Norm gate, disputes, projections that contradict each other, duplicate gate, what points
against a public reference, what stands apart, in this order and on one budget of
exclusions: the first must fit it, the others use what is left.

A dispute is about a mask of which two sites say different things, so one of them lies.
One end is left out, and opening its masks names the liar if the other end is in the sum:
so where there is a dispute nothing else is filtered. The round is lost, its liars are out
of the next.
Being excluded is no proof of malice, but for a norm above the clip, which a site's own
words show. It bounds what a few sites can do to the sum; it is no guarantee against a
backdoor inside the norm of honest updates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from common.errors import RoundError
from common.outliers import against_reference, copies, standing_apart
from common.secagg.encoding import encode
from common.update import Refusal

ABOVE_CLIP = "its norm is above the clip"
DISPUTED = "it and another site say different things about their mask"

STAGES = _VALIDATE, _SELECT, _DISPUTE = "validate", "select", "dispute"
"""Of refusals by a selection: a site's own words are not usable; a filter left it out, which proves nothing; another
site may have lied about it."""

_GATE_DEVIATIONS = 4.8
"""Standard deviations of a sketch's norm above the clip that an honest update may appear to have."""

_CONTRADICTION = 5.0
"""Standard deviations of a sketch between an update's length along a direction and what its sketch says of it."""


class TooManyExcludedError(RoundError):
    """Uploads that cannot be summed are more than may be left out. Attributes: `refusals` of them, by name."""

    def __init__(self, message: str, refusals: Mapping[str, Refusal]) -> None:
        super().__init__(message)
        self.refusals = refusals


@dataclass(frozen=True)
class Selection:
    """Attributes:
    excluded: why each of the others is not, by name.
    held: whether updates were held against a reference that was believed.
    """

    included: tuple[str, ...]
    excluded: Mapping[str, Refusal]
    held: bool = False


@dataclass(frozen=True, eq=False)
class Along:
    """Updates along a public reference.

    Attributes:
        lengths: of each update along it, by name.
        direction_K: sketch of the reference at length 1, which says the same less precisely. Two colluders may lie
            about the mask they share: what one adds to its number modulo 2³² the other takes away.
        dimension: of the updates.
    """

    lengths: Mapping[str, float]
    direction_K: np.ndarray
    dimension: int

    def contradicting(self, sketches: Mapping[str, np.ndarray], names: list[str]) -> list[str]:
        """Those whose number no update with their sketch has."""
        limit = _CONTRADICTION / math.sqrt(len(self.direction_K))
        return [
            name
            for name in names
            if not abs(self.lengths[name] - sketches[name] @ self.direction_K) <= limit * _length(sketches[name])
        ]

    def against(self, sketches: Mapping[str, np.ndarray], names: list[str]) -> list[str] | None:
        """Those that point against it, the clearest first; None where it is not believed."""
        cosines_N = np.array([self.lengths[name] / max(_length(sketches[name]), 1e-30) for name in names])
        rows_R = against_reference(cosines_N, self.dimension, liars=max(1, (len(names) - 1) // 4))
        return None if rows_R is None else [names[row] for row in rows_R]


def _length(vector_K: np.ndarray) -> float:
    return float(np.linalg.norm(vector_K))


def norm_limit(clip_norm: float, rows: int) -> float:
    """Largest norm that the sketch of a clipped update shows: 1.15 C for 512 rows."""
    return clip_norm * (1 + _GATE_DEVIATIONS / math.sqrt(2 * rows))


def select(
    sketches: Mapping[str, np.ndarray],
    *,
    clip_norm: float,
    disputes: Iterable[tuple[str, str]],
    budget: int,
    minimum: int,
    seed: bytes,
    filters: bool = True,
    along: Along | None = None,
) -> Selection:
    """Choose among the uploads.

    Args:
        sketches: of each update, before its weight; float64 [rows].
        disputes: pairs of sites that say different things about the mask they share.
        budget: exclusions that are left.
        minimum: updates that a sum needs; the filters leave so many.
        seed: nobody's choice; breaks ties.
        filters: whether to exclude what is merely unusual, and not only what cannot be summed.
        along: where there is a reference.
    Raises:
        TooManyExcludedError: more uploads must be excluded than may be.
    """
    excluded: dict[str, Refusal] = {}
    for name, sketch in sketches.items():
        norm = float(np.linalg.norm(sketch))
        if not norm <= norm_limit(clip_norm, len(sketch)):
            excluded[name] = Refusal(name, _VALIDATE, ABOVE_CLIP)
    if len(excluded) > budget:
        raise TooManyExcludedError(f"{len(excluded)} uploads must be excluded, at most {budget} may be", excluded)
    most = max(len(excluded), min(budget, len(sketches) - minimum))
    open_disputes = {pair for pair in disputes if not set(pair) & set(excluded)}
    if open_disputes:
        _settle(open_disputes, excluded, most, seed)
        return Selection(tuple(sorted(set(sketches) - set(excluded))), excluded)
    budget = most if filters else len(excluded)
    if along is not None:
        left = sorted(set(sketches) - set(excluded))
        for name in along.contradicting(sketches, left)[: budget - len(excluded)]:
            excluded[name] = Refusal(name, _SELECT, "its projections contradict each other")
    left = sorted(set(sketches) - set(excluded))
    points_NK = np.stack([sketches[name] for name in left]) if left else np.empty((0, 0))
    for row in copies(points_NK @ points_NK.T)[: budget - len(excluded)]:
        excluded[left[row]] = Refusal(left[row], _SELECT, "it nearly repeats another upload")
    against = None
    if along is not None and filters:
        against = along.against(sketches, sorted(set(sketches) - set(excluded)))
        for name in (against or [])[: budget - len(excluded)]:
            excluded[name] = Refusal(name, _SELECT, "it points against what public data teach")
    while len(excluded) < budget:
        left = sorted(set(sketches) - set(excluded))
        points_NK = np.stack([sketches[name] for name in left])
        rows, reason = standing_apart(points_NK @ points_NK.T, points_NK.shape[1])
        if not len(rows):
            break
        for row in rows[: budget - len(excluded)]:
            excluded[left[row]] = Refusal(left[row], _SELECT, reason)
    return Selection(tuple(sorted(set(sketches) - set(excluded))), excluded, held=against is not None)


def _settle(open_disputes: set[tuple[str, str]], excluded: dict[str, Refusal], most: int, seed: bytes) -> None:
    """Exclude one end of each dispute, those with most disputes first, until `most` are excluded.

    What is left open then does no more harm: the round is lost, and the last of those excluded has disputed with one
    that is not, so a liar is named.

    Raises:
        TooManyExcludedError: nobody may be excluded, so no mask would be opened.
    """
    if len(excluded) >= most:
        ends = sorted({name for pair in open_disputes for name in pair})
        disputed = {name: Refusal(name, _DISPUTE, DISPUTED) for name in ends}
        raise TooManyExcludedError("sites say different things about their masks", {**excluded, **disputed})
    while open_disputes and len(excluded) < most:
        ends = [name for pair in open_disputes for name in pair]
        loser = max(set(ends), key=lambda name: (ends.count(name), _draw(seed, name)))
        excluded[loser] = Refusal(loser, _DISPUTE, DISPUTED)
        open_disputes = {pair for pair in open_disputes if loser not in pair}


@dataclass(frozen=True)
class _Tie:
    seed: bytes
    name: str


def _draw(seed: bytes, name: str) -> bytes:
    return hashlib.sha256(encode(_Tie(seed, name))).digest()
