"""Nearest-neighbour mixing: each update becomes the mean of those closest to it.

Allouah et al. 2023, arXiv:2302.01772, algorithm 2. Before a robust rule it
lowers the honest spread that non-IID data causes, which is what liars hide in.
"""

from __future__ import annotations

import numpy as np

from aggregator.rules.columns import coordinatewise
from aggregator.rules.distances import WIDTH, gram, squared_distances
from aggregator.rules.trimmed_mean import block_trimmed_mean


def neighbour_shares(gram_NN: np.ndarray, *, liars: int) -> np.ndarray:
    """Row i: 1 / (N − liars) at each of i's N − liars nearest rows, itself included; float64 [N, N].

    Ties go to the lower row.
    """
    sites = len(gram_NN)
    distances_NN = squared_distances(gram_NN)
    np.fill_diagonal(distances_NN, -1.0)  # a row is always its own nearest, whatever rounding says
    nearest_NK = np.argsort(distances_NN, axis=1, kind="stable")[:, : sites - liars]
    shares_NN = np.zeros((sites, sites))
    np.put_along_axis(shares_NN, nearest_NK, 1 / (sites - liars), axis=1)
    return shares_NN


def nearest_neighbour_mixing(updates_ND: np.ndarray, *, liars: int) -> np.ndarray:
    """Mean of each row's N − liars nearest rows, itself included; float64 [N, D]."""
    return neighbour_shares(gram(updates_ND), liars=liars) @ updates_ND.astype(np.float64)


def mixed_trimmed_mean(
    updates_ND: np.ndarray, *, liars: int, gram_NN: np.ndarray | None = None, rows: np.ndarray | None = None
) -> np.ndarray:
    """The trimmed mean of the mixed updates, which are never all in memory; float32 [D].

    Args:
        gram_NN: inner products of the updates, where they are known.
        rows: M of the updates to mix, and no others; all by default.
    """
    gram_NN = gram(updates_ND) if gram_NN is None else gram_NN
    rows = np.arange(len(updates_ND)) if rows is None else rows
    shares_MN = np.zeros((len(rows), len(updates_ND)), np.float32)
    shares_MN[:, rows] = neighbour_shares(gram_NN[np.ix_(rows, rows)], liars=liars)
    return coordinatewise(lambda block_NK: block_trimmed_mean(_mixed(shares_MN, block_NK), trim=liars), updates_ND)


def _mixed(shares_MN: np.ndarray, block_NK: np.ndarray) -> np.ndarray:
    mixed_MK = np.empty((len(shares_MN), block_NK.shape[1]), block_NK.dtype)
    for start in range(0, block_NK.shape[1], WIDTH):
        part = slice(start, start + WIDTH)
        np.matmul(shares_MN, block_NK[:, part], out=mixed_MK[:, part])
    return mixed_MK
