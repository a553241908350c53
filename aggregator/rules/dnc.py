"""Divide and conquer: drop the updates that stick out along the direction of largest spread.

After Shejwalkar & Houmansadr 2021, "Manipulating the Byzantine" (NDSS), with two
changes: rows are dropped one at a time around the coordinate median, so that a
few large lies do not hide smaller ones; and in the normal state a row is only
dropped where its score is ten times the median one, so that a round without a
liar loses little.

With at most `liars` < N / 2 false rows every kept row is within √(10 N) times
(alert: √N) the largest honest distance of the coordinate median, which is itself
between honest rows in every coordinate.
"""

from __future__ import annotations

import numpy as np

from aggregator.rules.columns import by_blocks
from aggregator.rules.distances import block_gram
from aggregator.rules.median import block_median

THRESHOLD = 10.0
"""Times the median score above which a row is dropped in the normal state."""


def divide_and_conquer(
    updates_ND: np.ndarray, *, liars: int, alert: bool, among: np.ndarray | None = None
) -> np.ndarray:
    """Indices of the rows that are kept, in order.

    Args:
        updates_ND: updates, or projections of them.
        among: indices of the rows to choose from; all by default.
        liars: most rows that are dropped.
        alert: drop as many, whatever their scores.
    """
    kept = np.arange(len(updates_ND)) if among is None else among
    for _ in range(liars):
        scores_N = spectral_scores(updates_ND, kept)
        worst = int(np.argmax(scores_N))
        if not alert and scores_N[worst] <= THRESHOLD * np.median(scores_N):
            break
        kept = np.delete(kept, worst)
    return kept


def spectral_scores(updates_ND: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """⟨xᵢ − c, v⟩², c the coordinate median and v the top right singular vector of all xᵢ − c; float64, one per row."""
    centred_NN = np.zeros((len(rows), len(rows)))

    def one(block: slice) -> np.ndarray:
        block_NK = updates_ND[rows, block]
        return block_gram(block_NK - block_median(block_NK))

    for part_NN in by_blocks(one, updates_ND.shape[1]):
        centred_NN += part_NN
    values_N, vectors_NN = np.linalg.eigh(centred_NN)
    return values_N[-1] * vectors_NN[:, -1] ** 2
