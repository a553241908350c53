"""Which masked uploads to sum, judged by their sketches alone.

Norm gate, disputes, duplicate gate, spectral filter, in this order and on one
budget of exclusions: the first two must fit it, the last two use what is left.
Being excluded is no proof of malice. It bounds what a few sites can do to the sum;
it is no guarantee against a backdoor inside the norm of honest updates.

Shejwalkar & Houmansadr 2021, "Manipulating the Byzantine" (DnC).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from common.errors import RoundError
from common.secagg.encoding import encode

_GATE_DEVIATIONS = 4.8
"""Standard deviations of a sketch's norm above the clip that an honest update may appear to have."""

_DUPLICATE = 0.35
"""Of the median distance to a nearest neighbour; honest noise does not come closer."""

_OUTLIER = 10.0
"""Times the median spectral score, above which an update is left out in the normal state."""


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
    alert: bool,
    filters: bool = True,
) -> Selection:
    """Choose among the uploads.

    Args:
        sketches: of each update, before its weight; float64 [rows].
        disputes: pairs of sites that say different things about the mask they share.
        budget: exclusions that are left.
        minimum: updates that a sum needs. In the normal state the two filters leave so many; under alert they do not
            ask, and the round is lost where too few are left.
        seed: nobody's choice; breaks ties.
        filters: whether to exclude what is merely unusual, and not only what cannot be summed.
        alert: use the whole budget on the largest spectral scores, however small they are.
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
    if not filters:
        budget = len(excluded)
    elif not alert:
        budget = max(len(excluded), min(budget, len(sketches) - minimum))
    for name in _duplicates({n: s for n, s in sketches.items() if n not in excluded})[: budget - len(excluded)]:
        excluded[name] = "it nearly repeats another upload"
    while len(excluded) < budget:
        outlier = _outlier({n: s for n, s in sketches.items() if n not in excluded}, alert=alert)
        if outlier is None:
            break
        excluded[outlier] = "it stands apart from the others"
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


def _duplicates(sketches: Mapping[str, np.ndarray]) -> list[str]:
    """Uploads far closer to another than is usual, closest first."""
    if len(sketches) < 3:
        return []
    names = sorted(sketches)
    points_NK = np.stack([sketches[name] for name in names])
    distances_NN = np.linalg.norm(points_NK[:, None] - points_NK[None], axis=2)
    np.fill_diagonal(distances_NN, np.inf)
    nearest_N = distances_NN.min(axis=1)
    near = [
        index for index in np.argsort(nearest_N, kind="stable") if nearest_N[index] < _DUPLICATE * np.median(nearest_N)
    ]
    return [names[index] for index in near]


def _outlier(sketches: Mapping[str, np.ndarray], *, alert: bool) -> str | None:
    """The upload with the largest projection on the direction in which all differ most, if it stands out."""
    if len(sketches) < 3:
        return None
    names = sorted(sketches)
    points_NK = np.stack([sketches[name] for name in names])
    centred_NK = points_NK - np.median(points_NK, axis=0)
    direction_K = np.linalg.svd(centred_NK, full_matrices=False)[2][0]
    scores_N = (centred_NK @ direction_K) ** 2
    worst = int(np.argmax(scores_N))
    if not alert and scores_N[worst] <= _OUTLIER * np.median(scores_N):
        return None
    return names[worst]
