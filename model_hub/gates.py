"""Checks a candidate must pass before any traffic."""

from __future__ import annotations

import numpy as np

from common.adapter import Adapter

NORM_ALLOWANCE = 1.05
_FACTOR_TOLERANCE = 1e-4
_TINY = 1e-30


def refusal(candidate: Adapter, parent: Adapter, *, largest_change: float) -> str | None:
    """Why the candidate may not go on, or None.

    Args:
        largest_change: L2 norm one release may add to its parent, from the round's clip.
    """
    if set(candidate.tensors) != set(parent.tensors):
        return "schema: tensor names differ from the parent's"
    if any(candidate.tensors[name].shape != parent.tensors[name].shape for name in parent.tensors):
        return "schema: tensor shapes differ from the parent's"
    if not all(np.isfinite(tensor).all() for tensor in candidate.tensors.values()):
        return "finite: a weight is not a finite number"
    names = list(parent.tensors)
    with np.errstate(over="ignore"):
        change = np.linalg.norm(candidate.flatten(names).astype(np.float64) - parent.flatten(names))
    if not change <= largest_change * NORM_ALLOWANCE:
        return f"norm: the change from its parent is {change:.3g}, at most {largest_change:.3g} is allowed"
    return None


def not_the_same_function(candidate: Adapter, published: Adapter) -> str | None:
    """Why `published` is not the candidate in other factors, or None."""
    if published is candidate:
        return None
    products = candidate.products()
    difference = np.linalg.norm(published.products() - products) / (np.linalg.norm(products) + _TINY)
    if not difference <= _FACTOR_TOLERANCE:
        return f"factors: the published products differ from the candidate's by {difference:.1e}"
    return None
