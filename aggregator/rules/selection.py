"""Which updates of a round go into it: norm gate, duplicate gate, divide and conquer.

Works on whole updates and on projections of them alike, so the same function
chooses where the server sees the former (`sealed`) and where it sees only the
latter (`secagg_sketch`). Being left out is no proof of malice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aggregator.rules.distances import gram, squared_distances
from aggregator.rules.dnc import divide_and_conquer
from aggregator.rules.duplicate_gate import duplicate_gate
from aggregator.rules.norm_gate import norm_gate


@dataclass(frozen=True)
class Selection:
    """Rows by what became of them; each of `rows` is in exactly one."""

    kept: tuple[int, ...]
    too_long: tuple[int, ...]
    duplicates: tuple[int, ...]
    outliers: tuple[int, ...]


def select(rows_ND: np.ndarray, *, largest_norm: float, liars: int, alert: bool) -> Selection:
    """Choose rows; a row that is not finite counts as too long.

    Args:
        rows_ND: updates, or projections of them divided by their sites' weights.
        largest_norm: of an honest row.
        liars: tolerated; a row that is too long uses up one of them.
        alert: see `divide_and_conquer`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        gram_NN = gram(rows_ND)
        short_N = norm_gate(np.sqrt(np.diag(gram_NN)), largest=largest_norm)
    short = np.flatnonzero(short_N)
    distances = np.sqrt(squared_distances(gram_NN[np.ix_(short, short)]))
    single_N = duplicate_gate(distances) if len(short) > 1 else np.ones(len(short), bool)
    single = short[single_N]
    allowed = max(0, liars - (len(rows_ND) - len(short)))
    allowed = min(allowed, max(0, len(single) - 1))
    kept = divide_and_conquer(rows_ND, liars=allowed, alert=alert, among=single)
    return Selection(
        kept=tuple(map(int, kept)),
        too_long=tuple(map(int, np.flatnonzero(~short_N))),
        duplicates=tuple(map(int, short[~single_N])),
        outliers=tuple(map(int, np.setdiff1d(single, kept))),
    )
