"""Sorting each column of a block without looking at its values: Batcher's odd-even merge sort.

Batcher 1968, "Sorting networks and their applications". A comparator orders two
whole rows by element-wise minimum and maximum, so a column costs no branch and
the processor takes eight of them at a time. Of the network only the comparators
are kept that a wanted row depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Comparator:
    """Puts the smaller of two rows at `low` and the larger at `high`; a row nobody needs is left as it is."""

    low: int
    high: int
    low_needed: bool
    high_needed: bool


@lru_cache
def network(rows: int, first: int, last: int) -> tuple[Comparator, ...]:
    """Comparators after which the rows `first` to `last` (exclusive) hold what sorting would put there."""
    needed = set(range(first, last))
    kept = []
    for low, high in reversed(list(_odd_even_merge_sort(rows))):
        if low in needed or high in needed:
            kept.append(Comparator(low, high, low in needed, high in needed))
            needed |= {low, high}
    return tuple(reversed(kept))


def _odd_even_merge_sort(rows: int) -> Iterator[tuple[int, int]]:
    """All comparators; Knuth, TAOCP vol. 3, algorithm 5.2.2M for any number of rows."""
    top = 1 << max(0, rows - 1).bit_length() - 1 if rows > 1 else 0
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            for i in range(rows - d):
                if i & p == r:
                    yield i, i + d
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1


def sorted_rows(block_NK: np.ndarray, first: int, last: int) -> list[np.ndarray]:
    """The rows `first` to `last` (exclusive) of `block_NK` sorted along its columns.

    A value that is not a number comes out in every row it could have been sorted to.
    """
    rows = list(block_NK.copy())
    spare_K = np.empty_like(rows[0])
    for comparator in network(len(rows), first, last):
        low_K, high_K = rows[comparator.low], rows[comparator.high]
        if not comparator.high_needed:
            np.minimum(low_K, high_K, out=low_K)
        elif not comparator.low_needed:
            np.maximum(low_K, high_K, out=high_K)
        else:
            np.minimum(low_K, high_K, out=spare_K)
            np.maximum(low_K, high_K, out=high_K)
            rows[comparator.low], spare_K = spare_K, low_K
    return rows[first:last]
