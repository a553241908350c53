"""Work on updates in blocks of columns that stay in the cache, on a few threads.

No rule needs more of the updates at a time than one block, so none copies them
as a whole. Blocks come back in order and do not depend on how many threads there
are: neither does any result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

BLOCK = 16_384
THREADS = min(4, os.cpu_count() or 1)

Part = TypeVar("Part")


def by_blocks(work: Callable[[slice], Part], columns: int) -> Iterator[Part]:
    """`work` of every block of columns, in order."""
    blocks = [slice(start, min(start + BLOCK, columns)) for start in range(0, columns, BLOCK)]
    if len(blocks) == 1 or THREADS == 1:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(work, blocks)


def coordinatewise(rule: Callable[[np.ndarray], np.ndarray], updates_ND: np.ndarray) -> np.ndarray:
    """A rule that treats each coordinate by itself, given by what it does with one block [N, K]; float32 [D]."""
    result_D = np.empty(updates_ND.shape[1], np.float32)

    def one(block: slice) -> None:
        result_D[block] = rule(updates_ND[:, block])

    for _ in by_blocks(one, updates_ND.shape[1]):
        pass
    return result_D
