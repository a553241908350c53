"""The span test on LoRA gradients: which tokens does one update name?

In the first layer the gradient of a lora_A is a sum of (something) · xᵀ over the
tokens' normed input embeddings x, which do not depend on the position. Its row
space is therefore spanned by the embeddings of the tokens that are present, and
testing every token of the vocabulary against that space names them (Petrov et al.
2024, "DAGER: Exact Gradient Inversion for Large Language Models", arXiv:2405.15586).
The gradient of a lora_B shows that space only after the projection A, in r dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RANK_TOLERANCE = 1e-5
"""Singular values below this share of the largest are float32's rounding."""
_MARGIN = 1.1
"""On the noise measured from one direction, which scatters by some per cent."""
_INSIDE = 1e-6
"""Distances below this are rounding."""


@dataclass(frozen=True)
class Released:
    """What the attacker has of one release: first-layer gradients, and what each token would look like in them.

    Attributes:
        blocks: matrices [rows, h]; their row spaces are tested.
        candidates: per block, one row per token of the vocabulary, [V, h].
        noise_scale: standard deviation of the noise on each value, as claimed.
    """

    blocks: tuple[np.ndarray, ...]
    candidates: tuple[np.ndarray, ...]
    noise_scale: float = 0.0


@dataclass(frozen=True)
class Recovery:
    """Result of the attack on one release.

    Attributes:
        recovered: present tokens within the threshold.
        false_positives: absent tokens within it.
        ranked: present tokens among as many nearest ones as there are present; undecided ones do not count.
    """

    recovered: frozenset[int]
    false_positives: int
    ranked: frozenset[int]


def row_space(block: np.ndarray, noise_scale: float) -> np.ndarray:
    """Orthonormal rows of the directions above rounding and above what noise alone would reach, at least one.

    Noise of scale s has singular values within s·(√rows ± √columns). The attacker takes s from the
    weakest direction where that is less than what is claimed: a claim may be wrong.
    """
    _, singular, directions = np.linalg.svd(block, full_matrices=False)
    rows, columns = block.shape[0] ** 0.5, block.shape[1] ** 0.5
    measured = _MARGIN * float(singular[-1]) / max(abs(rows - columns), 1e-9)
    edge = min(noise_scale, measured) * (rows + columns)
    kept = int((singular > max(edge, _RANK_TOLERANCE * singular[0])).sum())
    return directions[: max(1, kept)]


def distances(released: Released) -> np.ndarray:
    """Distance of each token from the row spaces, relative to its length, [V]; root mean square over blocks."""
    squares = []
    for block, candidates_VH in zip(released.blocks, released.candidates, strict=True):
        lengths_V = np.maximum((candidates_VH**2).sum(axis=1), 1e-30)
        inside_V = ((candidates_VH @ row_space(block, released.noise_scale).T) ** 2).sum(axis=1)
        squares.append(np.clip(1 - inside_V / lengths_V, 0, 1))
    distances_V: np.ndarray = np.sqrt(np.mean(squares, axis=0))
    return np.where(distances_V < _INSIDE, 0.0, distances_V)


def threshold(distances_V: np.ndarray, present: frozenset[int]) -> float:
    """Halfway between the nearest absent token and the present ones nearer than it."""
    inside_V = np.isin(np.arange(len(distances_V)), list(present))
    nearest_absent = float(distances_V[~inside_V].min())
    separated = distances_V[inside_V & (distances_V < nearest_absent)]
    return (nearest_absent + float(separated.max(initial=0.0))) / 2


def recover(distances_V: np.ndarray, present: Sequence[int] | frozenset[int], limit: float) -> Recovery:
    """What the attacker names; the number of tokens present is given to them for the ranking."""
    true = frozenset(present)
    near = frozenset(np.flatnonzero(distances_V <= limit).tolist())
    next_nearest = np.sort(distances_V)[len(true)]
    ranked = frozenset(np.flatnonzero(distances_V < next_nearest).tolist())
    return Recovery(near & true, len(near - true), ranked & true)
