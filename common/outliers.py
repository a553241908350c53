"""Which of some updates stand out, judged by their inner products alone and not by how long they are.

Honest updates differ in length, in how much they share and in how much noise they
carry: a small site's is nearly all noise. So angles are compared, and an update
stands apart only where

1. it is far from all others, farther than honest lengths explain; or
2. it points against the sum of the others, more than chance and than most; or
3. it is one of a few that pull one way together, and the rest do not.

A lone update in a direction of its own is none of these: nothing tells it from a
site whose noise hides what it learned. Thresholds are set for at most one round in
twenty that loses an honest update; `tests/common/test_outliers.py` measures it. They
count on noise: where what sites share is six times their noise and more, which no
private update is, distances are lengths, and (1) leaves out short ones too.

The third is the spectral test of Shejwalkar & Houmansadr 2021, "Manipulating the
Byzantine" (NDSS), on rows of unit length and beyond the edge of noise (Marchenko & Pastur 1967).
"""

from __future__ import annotations

import math

import numpy as np

from common.errors import RoundError

FAR = 3.0
"""Times the usual distance to others; honest norms between 0.3 C and C explain 2.5."""

_AGAINST_NOISE, _AGAINST_SPREAD = 3.5, 2.5
"""Standard deviations of noise below 0, and robust ones of all sites below their median."""

_EDGE = 1.2
"""Times the largest eigenvalue of pure noise, from which a direction counts as one."""

_TOGETHER_SPREAD, _TOGETHER_SHARE = 4.5, 0.3
"""Robust standard deviations from the median along it, and the share of an update's square that lies along it."""

_FEW = 0.25
"""Of all; what more do together is no exception."""

_AGREES, _DISAGREES, _DISAGREES_SPREAD = 1.5, -2.5, 4.0
"""Standard deviations of noise: what updates must show along a reference for it to be believed, and where one that
points against it is left out; and robust ones of all sites below their median, for sites differ in more than noise."""

_COPY_COSINE, _COPY_DISTANCE = 0.95, 0.35
"""At least so parallel, and nearer than this times the median distance to a nearest neighbour."""

_MOST_ROWS = 512
"""More dimensions lower the noise and not what honest sites differ in: thresholds are those of so many."""

_MAD = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""


def cosines(gram_NN: np.ndarray) -> np.ndarray:
    """Cosines of the angles between rows, from their inner products; 0 for a row that is zero."""
    lengths_N = np.sqrt(np.maximum(np.diag(gram_NN), 0.0))
    per_length_N = np.divide(1.0, lengths_N, out=np.zeros_like(lengths_N), where=lengths_N > 0)
    cosines_NN = gram_NN * per_length_N[:, None] * per_length_N[None, :]
    np.fill_diagonal(cosines_NN, lengths_N > 0)
    return cosines_NN


def copies(gram_NN: np.ndarray) -> np.ndarray:
    """Indices of rows that repeat another but for their length, closest first.

    Every honest update has noise of its own, so two are never near each other; copies of one lie are. Owners of
    several sites who add noise of their own pass. Two honest sites with the same customers may be caught.
    """
    if len(gram_NN) < 3:
        return np.empty(0, np.intp)
    nearest_N = np.max(cosines(gram_NN) - 2 * np.eye(len(gram_NN)), axis=1)
    distances_N = np.sqrt(np.maximum(2 - 2 * nearest_N, 0.0))
    near_N = (nearest_N > _COPY_COSINE) & (distances_N < _COPY_DISTANCE * np.median(distances_N))
    order_N = np.argsort(distances_N, kind="stable")
    return order_N[near_N[order_N]]


def against_reference(cosines_N: np.ndarray, dimension: int, *, liars: int) -> np.ndarray | None:
    """Indices of updates that point against a public reference, the clearest first; None where it is not believed.

    The reference is what training on public data changes, without noise. It tells a negated update from an honest
    one where updates are nearly all noise and tell nothing about each other. It says nothing of what is orthogonal
    to it. Left out is what is below zero by more than noise, and further below the median than those differ that
    are not among the lowest, which may be liars. It is believed where most updates agree with it, whatever so many
    liars send. Cao et al. 2021, "FLTrust" (NDSS), as a gate and not as weights.

    Args:
        cosines_N: of the angle between each update and the reference.
        dimension: of the updates.
        liars: that may be among them.
    """
    if len(cosines_N) < 3:
        return None
    deviations_N = np.asarray(cosines_N, np.float64) * math.sqrt(dimension)
    order_N = np.argsort(deviations_N, kind="stable")
    if not deviations_N[order_N[(len(order_N) - liars) // 2]] >= _AGREES:
        return None
    middle, spread = _middle_and_spread(deviations_N[order_N[liars:]], 1.0)
    return order_N[deviations_N[order_N] < min(_DISAGREES, middle - _DISAGREES_SPREAD * spread)]


def standing_apart(gram_NN: np.ndarray, dimension: int) -> tuple[np.ndarray, str]:
    """Indices of the rows that stand apart, and how; none where all look honest.

    Args:
        gram_NN: inner products of the updates, or of sketches of them.
        dimension: of what was multiplied.
    Raises:
        RoundError: a value is not finite.
    """
    if not np.isfinite(gram_NN).all():
        raise RoundError("updates with values that are not finite cannot be compared")
    if len(gram_NN) < 4:
        return np.empty(0, np.intp), ""
    noise = 1 / math.sqrt(min(dimension, _MOST_ROWS))
    cosines_NN = cosines(gram_NN)
    if len(rows := _far(gram_NN)):
        return rows, "it is far from all others"
    if len(rows := _against(cosines_NN, noise)):
        return rows, "it points against the others"
    return _together(cosines_NN, noise), "it and a few others pull where the rest do not"


def _far(gram_NN: np.ndarray) -> np.ndarray:
    """The row with the largest median distance to all, if it is too large."""
    squares_N = np.diag(gram_NN)
    distances_NN = np.sqrt(np.maximum(squares_N[:, None] + squares_N[None, :] - 2 * gram_NN, 0.0))
    usual_N = np.median(distances_NN, axis=1)
    worst = np.argmax(usual_N)
    return np.array([worst]) if usual_N[worst] > FAR * np.median(usual_N) else np.empty(0, np.intp)


def _against(cosines_NN: np.ndarray, noise: float) -> np.ndarray:
    """The row with the lowest cosine to the sum of the others' unit vectors, if it is too low."""
    to_all_N = cosines_NN.sum(axis=1)
    squares_N = to_all_N.sum() - 2 * to_all_N + 1  # of the length of the sum of the others
    agreement_N = (to_all_N - 1) / np.sqrt(np.maximum(squares_N, 1.0))
    worst = np.argmin(agreement_N)
    middle, spread = _middle_and_spread(agreement_N, noise)
    limit = min(-_AGAINST_NOISE * noise, middle - _AGAINST_SPREAD * spread)
    return np.array([worst]) if agreement_N[worst] < limit else np.empty(0, np.intp)


def _together(cosines_NN: np.ndarray, noise: float) -> np.ndarray:
    """Few rows far along one direction; the farthest first.

    The direction is the strongest beside the sum of all, which is what honest sites have in common, and then the
    strongest around the mean, for where the few are most of that sum.
    """
    count = len(cosines_NN)
    to_all_N = cosines_NN.sum(axis=1)
    beside_NN = cosines_NN - np.outer(to_all_N, to_all_N) / max(float(to_all_N.sum()), 1.0)
    centring_NN = np.eye(count) - 1 / count
    for spread_NN in (beside_NN, centring_NN @ cosines_NN @ centring_NN):
        along_N = _along(spread_NN, noise)
        order_N = np.argsort(-along_N, kind="stable")
        group = order_N[along_N[order_N] > _TOGETHER_SHARE]
        if 2 <= len(group) <= _FEW * count:
            return group
    return np.empty(0, np.intp)


def _along(gram_NN: np.ndarray, noise: float) -> np.ndarray:
    """The share of each row that lies along the strongest direction, on the far side; 0 where noise explains it."""
    values_N, vectors_NN = np.linalg.eigh(gram_NN)
    if values_N[-1] < _EDGE * (1 + noise * math.sqrt(len(gram_NN))) ** 2:
        return np.zeros(len(gram_NN))
    along_N = math.sqrt(values_N[-1]) * vectors_NN[:, -1]
    middle, spread = _middle_and_spread(along_N, noise)
    along_N = along_N - middle
    along_N *= np.sign(along_N[np.argmax(np.abs(along_N))])
    return np.where(along_N > _TOGETHER_SPREAD * spread, along_N**2, 0.0)


def _middle_and_spread(values_N: np.ndarray, noise: float) -> tuple[float, float]:
    """Median and robust standard deviation, the latter at least that of noise."""
    middle = float(np.median(values_N))
    return middle, max(_MAD * float(np.median(np.abs(values_N - middle))), noise)
