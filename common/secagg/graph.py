"""Who masks with whom: everybody up to 100 sites, k neighbours each above.

The graph comes from a hash of all keys of the session, which no party chooses
alone; who speaks last may try many keys, so the sizes leave 2⁴⁰ tries. They hold
for f colluders among those present, exactly (hypergeometric tails, no estimate):

* no honest site has `share_threshold` colluders among its neighbours (2⁻⁸⁰ over all sites, so 2⁻⁴⁰ after the tries);
* every site insists that `minimum_neighbours` of its neighbours are in the chosen set. All but `share_threshold` − 1 of
  them are honest, so a sum that is revealed holds `HONEST_NEIGHBOURS` + 1 honest updates at least, whatever sites the
  server drops;
* with a tenth of the sites gone, everybody has enough neighbours left (2⁻²⁰).

Bell et al. 2020, arXiv:2007.05297 ("SecAgg+"), whose server may not choose who drops out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from math import comb

from common.secagg.encoding import encode

LARGEST_COMPLETE = 100
HONEST_NEIGHBOURS = 32
_COLLUSION, _DROPOUT = Fraction(1, 2**80), Fraction(1, 2**20)
_STEP = 4


@dataclass(frozen=True)
class Degree:
    """Attributes:
    neighbours: k of every site.
    share_threshold: shares that open a secret; a site's neighbours and itself hold one each.
    minimum_neighbours: of a site that must be in every set it accepts.
    """

    neighbours: int
    share_threshold: int
    minimum_neighbours: int


@lru_cache(maxsize=64)
def degree(present: int, *, colluders: int, quorum: int) -> Degree:
    """Sizes for the sites that gave keys; the same on every machine."""
    others = present - 1
    complete = Degree(others, quorum, quorum - 1)
    if present <= LARGEST_COMPLETE:
        return complete
    alive = others - -(-others // 10)
    for neighbours in range(2 * HONEST_NEIGHBOURS, others, _STEP):
        threshold = 1 + _quantile_above(others, colluders, neighbours, _COLLUSION / present)
        minimum = threshold - 1 + HONEST_NEIGHBOURS
        if minimum <= _quantile_below(others, alive, neighbours, _DROPOUT / present):
            return Degree(neighbours, threshold, minimum)
    return complete


@dataclass(frozen=True)
class _Place:
    seed: bytes
    site: str


@dataclass(frozen=True)
class Graph:
    """Neighbours on a ring of randomly placed sites; of all others where the degree says so.

    Attributes:
        names: sites that gave keys, sorted.
        seed: 32 bytes that depend on all their keys.
    """

    names: tuple[str, ...]
    degree: Degree
    seed: bytes
    _near: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def _ring(self) -> tuple[Sequence[str], dict[str, int]]:
        ring = sorted(self.names, key=lambda name: hashlib.sha256(encode(_Place(self.seed, name))).digest())
        return ring, {name: place for place, name in enumerate(ring)}

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Sorted; without the site itself."""
        if name not in self._near:
            self._near[name] = self._neighbours(name)
        return self._near[name]

    def _neighbours(self, name: str) -> tuple[str, ...]:
        if self.degree.neighbours >= len(self.names) - 1:
            return tuple(other for other in self.names if other != name)
        ring, places = self._ring
        half = self.degree.neighbours // 2
        steps = [step for step in range(-half, half + 1) if step]
        return tuple(sorted(ring[(places[name] + step) % len(ring)] for step in steps))

    def holders(self, dealer: str) -> tuple[str, ...]:
        """Who holds shares of a dealer's secrets: its neighbours and itself, sorted."""
        return tuple(sorted((*self.neighbours(dealer), dealer)))


def _quantile_above(population: int, marked: int, drawn: int, chance: Fraction) -> int:
    """The smallest x with P[more than x marked are drawn] ≤ chance."""
    allowed, ways, x = chance * comb(population, drawn), 0, min(marked, drawn)
    while x > 0:
        ways += comb(marked, x) * comb(population - marked, drawn - x)
        if ways > allowed:
            return x
        x -= 1
    return 0


def _quantile_below(population: int, marked: int, drawn: int, chance: Fraction) -> int:
    """The largest x with P[fewer than x marked are drawn] ≤ chance."""
    allowed, ways = chance * comb(population, drawn), 0
    for x in range(max(0, drawn - (population - marked)), min(marked, drawn) + 1):
        ways += comb(marked, x) * comb(population - marked, drawn - x)
        if ways > allowed:
            return x
    return min(marked, drawn)
