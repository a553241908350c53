"""Distances between updates, from their Gram matrix.

‖x‖² + ‖y‖² − 2⟨x, y⟩ loses all digits where x and y are much longer than their
difference. So these are updates and never whole weights, and products are
accumulated in float64, in which that still leaves eight digits. The same holds of
one row beside others a million times shorter: validation bounds every norm by the
clip before a rule sees it.
"""

from __future__ import annotations

import numpy as np

from aggregator.rules.columns import by_blocks

WIDTH = 1024
"""Columns converted at a time: small enough that BLAS starts no threads of its own beside ours."""


def gram(updates_ND: np.ndarray) -> np.ndarray:
    """⟨xᵢ, xⱼ⟩ in float64 [N, N]; one pass."""
    total_NN = np.zeros((len(updates_ND), len(updates_ND)))
    for part_NN in by_blocks(lambda block: block_gram(updates_ND[:, block]), updates_ND.shape[1]):
        total_NN += part_NN
    return total_NN


def block_gram(block_NK: np.ndarray) -> np.ndarray:
    """The Gram matrix of one block."""
    total_NN = np.zeros((len(block_NK), len(block_NK)))
    for start in range(0, block_NK.shape[1], WIDTH):
        wide = block_NK[:, start : start + WIDTH].astype(np.float64)
        total_NN += wide @ wide.T
    return total_NN


def squared_distances(gram_NN: np.ndarray) -> np.ndarray:
    """‖xᵢ − xⱼ‖² [N, N], the diagonal exactly 0."""
    squares_N = np.diag(gram_NN)
    distances_NN = np.maximum(squares_N[:, None] + squares_N[None, :] - 2 * gram_NN, 0.0)
    np.fill_diagonal(distances_NN, 0.0)
    return distances_NN


def distances_to_mixture(gram_NN: np.ndarray, shares_N: np.ndarray) -> np.ndarray:
    """‖xᵢ − Σⱼ sⱼ xⱼ‖ [N]."""
    to_mixture_N = gram_NN @ shares_N
    return np.sqrt(np.maximum(np.diag(gram_NN) - 2 * to_mixture_N + shares_N @ to_mixture_N, 0.0))
