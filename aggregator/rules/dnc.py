"""Divide and conquer: drop the updates that stand apart, a few in each step.

After Shejwalkar & Houmansadr 2021, "Manipulating the Byzantine" (NDSS), with two
changes: rows are dropped in steps, so that a few large lies do not hide smaller
ones; and in the normal state only those that `common.outliers` tells from honest
updates of other lengths and directions, so that a round without a liar loses little.

With at most `liars` < N / 3 false rows every kept row is within FAR = 3 times the
largest distance between two honest rows of an honest one, or, under alert, within √N
times the largest honest distance of the coordinate median, which is itself between
honest rows in every coordinate.
"""

from __future__ import annotations

import numpy as np

from aggregator.rules.columns import by_blocks
from aggregator.rules.distances import block_gram
from aggregator.rules.median import block_median
from common.outliers import standing_apart


def divide_and_conquer(
    updates_ND: np.ndarray, gram_NN: np.ndarray, *, liars: int, alert: bool, among: np.ndarray | None = None
) -> np.ndarray:
    """Indices of the rows that are kept, in order.

    Args:
        updates_ND: updates, or projections of them.
        gram_NN: their inner products.
        among: indices of the rows to choose from; all by default.
        liars: most rows that are dropped.
        alert: drop as many, whatever they look like: where none stands apart, that with the largest spectral score.
    """
    kept = np.arange(len(updates_ND)) if among is None else among
    fewest = len(kept) - liars
    while len(kept) > fewest:
        rows, _ = standing_apart(gram_NN[np.ix_(kept, kept)], updates_ND.shape[1])
        if not len(rows):
            if not alert:
                break
            rows = np.array([np.argmax(spectral_scores(updates_ND, kept))])
        kept = np.delete(kept, rows[: len(kept) - fewest])
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
