"""Neighbourhoods above a hundred sites: as large as the chances they promise, and symmetric."""

from __future__ import annotations

import os

import pytest
from scipy.stats import hypergeom

from common.secagg.context import colluders_of, quorum_of
from common.secagg.graph import HONEST_NEIGHBOURS, Degree, Graph, degree


@pytest.mark.parametrize("sites", [101, 128, 200, 300, 500, 1000])
def test_sizes_hold_their_chances(sites: int) -> None:
    colluders = colluders_of(sites)
    found = degree(sites, colluders=colluders, quorum=quorum_of(sites))
    others, k = sites - 1, found.neighbours
    assert k < others and k % 2 == 0
    too_many = hypergeom.logsf(found.share_threshold - 1, others, colluders, k)
    assert too_many / 0.6931471805599453 <= -80 - _log2(sites) + 1e-6
    alive = others - -(-others // 10)
    assert hypergeom.cdf(max(found.minimum_neighbours, found.share_threshold) - 1, others, alive, k) * sites <= 2**-20
    assert found.minimum_neighbours - (found.share_threshold - 1) >= HONEST_NEIGHBOURS


def _log2(number: int) -> float:
    return number.bit_length() - 1


def test_up_to_a_hundred_sites_everybody_is_a_neighbour() -> None:
    for sites in (3, 10, 100):
        quorum = quorum_of(sites)
        assert degree(sites, colluders=colluders_of(sites), quorum=quorum) == Degree(sites - 1, quorum, quorum - 1)
    names = ("a", "b", "c")
    graph = Graph(names, degree(3, colluders=0, quorum=2), bytes(32))
    assert graph.neighbours("b") == ("a", "c") and graph.holders("b") == names


def test_where_no_smaller_neighbourhood_is_safe_the_graph_is_complete() -> None:
    assert degree(150, colluders=140, quorum=146) == Degree(149, 146, 145)


def test_neighbours_are_mutual_regular_and_drawn_by_the_seed() -> None:
    names = tuple(f"s{i:03}" for i in range(150))
    size = degree(150, colluders=49, quorum=100)
    graph, other = Graph(names, size, os.urandom(32)), Graph(names, size, os.urandom(32))
    near = {name: set(graph.neighbours(name)) for name in names}
    assert all(len(near[name]) == size.neighbours and name not in near[name] for name in names)
    assert all(name in near[neighbour] for name in names for neighbour in near[name])
    assert any(near[name] != set(other.neighbours(name)) for name in names)
    assert all(graph.neighbours(name) == tuple(sorted(near[name])) for name in names)  # asked again, the same
    assert graph == Graph(names, size, graph.seed) and hash(graph) == hash(Graph(names, size, graph.seed))
