"""Which masked uploads to sum, judged by their sketches alone.

Norm gate, disputes, what points against a public reference, duplicate gate, what stands
apart, in this order and on one budget of exclusions: the first two must fit it, the
others use what is left.
Being excluded is no proof of malice. It bounds what a few sites can do to the sum;
it is no guarantee against a backdoor inside the norm of honest updates.
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

_GATE_DEVIATIONS = 4.8
"""Standard deviations of a sketch's norm above the clip that an honest update may appear to have."""


@dataclass(frozen=True)
class Selection:
    """Attributes: why each of the others was excluded, by name."""

    included: tuple[str, ...]
    excluded: Mapping[str, str]


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
    along: Mapping[str, float] | None = None,
    dimension: int = 0,
) -> Selection:
    """Choose among the uploads.

    Args:
        sketches: of each update, before its weight; float64 [rows].
        disputes: pairs of sites that say different things about the mask they share.
        budget: exclusions that are left.
        minimum: updates that a sum needs; the filters leave so many.
        seed: nobody's choice; breaks ties.
        filters: whether to exclude what is merely unusual, and not only what cannot be summed.
        along: length of each update along a public reference; none for no reference.
        dimension: of the updates; used with `along` only.
    Raises:
        RoundError: more uploads must be excluded than may be.
    """
    excluded: dict[str, str] = {}
    for name, sketch in sketches.items():
        norm = float(np.linalg.norm(sketch))
        if not norm <= norm_limit(clip_norm, len(sketch)):
            excluded[name] = "its norm is above the clip"
    _settle({pair for pair in disputes if not set(pair) & set(excluded)}, excluded, seed)
    if len(excluded) > budget:
        raise RoundError(f"{len(excluded)} uploads must be excluded, at most {budget} may be")
    budget = max(len(excluded), min(budget, len(sketches) - minimum)) if filters else len(excluded)
    left = sorted(set(sketches) - set(excluded))
    if along:
        cosines_N = np.array([along[name] / max(float(np.linalg.norm(sketches[name])), 1e-30) for name in left])
        for row in against_reference(cosines_N, dimension)[: budget - len(excluded)]:
            excluded[left[row]] = "it points against what public data teach"
        left = sorted(set(sketches) - set(excluded))
    points_NK = np.stack([sketches[name] for name in left]) if left else np.empty((0, 0))
    for row in copies(points_NK @ points_NK.T)[: budget - len(excluded)]:
        excluded[left[row]] = "it nearly repeats another upload"
    while len(excluded) < budget:
        left = sorted(set(sketches) - set(excluded))
        points_NK = np.stack([sketches[name] for name in left])
        rows, reason = standing_apart(points_NK @ points_NK.T, points_NK.shape[1])
        if not len(rows):
            break
        excluded.update({left[row]: reason for row in rows[: budget - len(excluded)]})
    return Selection(tuple(sorted(set(sketches) - set(excluded))), excluded)


def _settle(open_disputes: set[tuple[str, str]], excluded: dict[str, str], seed: bytes) -> None:
    """Exclude one end of every dispute, those with most disputes first; who lied shows when its masks are opened."""
    while open_disputes:
        ends = [name for pair in open_disputes for name in pair]
        loser = max(set(ends), key=lambda name: (ends.count(name), _draw(seed, name)))
        excluded[loser] = "it and another site say different things about their mask"
        open_disputes = {pair for pair in open_disputes if loser not in pair}


@dataclass(frozen=True)
class _Tie:
    seed: bytes
    name: str


def _draw(seed: bytes, name: str) -> bytes:
    return hashlib.sha256(encode(_Tie(seed, name))).digest()
