"""Each rule against its definition, written in the most literal way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from aggregator.federation import check_rule
from aggregator.rules import RULES, default_rule
from aggregator.rules.centred_clipping import ITERATIONS, centred_clipping
from aggregator.rules.columns import BLOCK
from aggregator.rules.distances import gram, squared_distances
from aggregator.rules.dnc import divide_and_conquer, spectral_scores
from aggregator.rules.geometric_median import geometric_median
from aggregator.rules.krum import krum, krum_scores, multi_krum
from aggregator.rules.mean import capped_shares, weighted_mean
from aggregator.rules.median import coordinate_median
from aggregator.rules.nnm import mixed_trimmed_mean, nearest_neighbour_mixing
from aggregator.rules.norm_gate import norm_gate
from aggregator.rules.sorting_network import network, sorted_rows
from aggregator.rules.trimmed_mean import trimmed_mean
from aggregator.rules.vigilance import ALERT_ROUNDS, Evidence, Vigilance, advance
from common.errors import ConfigError, RoundError
from common.outliers import copies

UPDATES = np.random.default_rng(0).normal(size=(7, 30)).astype(np.float32)
WIDE = UPDATES.astype(np.float64)
DISTANCES = np.linalg.norm(WIDE[:, None] - WIDE[None], axis=2)


# --- sorting


@pytest.mark.parametrize("rows", [*range(1, 12), 20, 33])
def test_a_network_sorts_whatever_part_is_wanted(rows: int) -> None:
    block = np.random.default_rng(rows).integers(0, 9, size=(rows, 300)).astype(np.float32)
    expected = np.sort(block, axis=0)
    before = block.copy()
    for first in range(0, rows, max(1, rows // 4)):
        for last in range(first + 1, rows + 1, max(1, rows // 4)):
            np.testing.assert_array_equal(sorted_rows(block, first, last), expected[first:last])
    np.testing.assert_array_equal(block, before)


@pytest.mark.parametrize("rows", range(2, 11))
def test_a_network_sorts_all_zeros_and_ones_and_so_everything(rows: int) -> None:
    """Knuth's zero-one principle: what sorts every 0-1 sequence sorts every sequence."""
    block = np.array(list(itertools.product([0, 1], repeat=rows)), np.float32).T
    np.testing.assert_array_equal(sorted_rows(block, 0, rows), np.sort(block, axis=0))


def test_only_the_comparators_that_matter_are_kept() -> None:
    assert len(network(20, 9, 11)) < len(network(20, 0, 20))
    assert all(c.low_needed or c.high_needed for c in network(20, 9, 11))


# --- rules that make a result of their own


@pytest.mark.parametrize("sites", [3, 4, 7, 10])
def test_the_median_is_numpys(sites: int) -> None:
    updates = np.random.default_rng(sites).normal(size=(sites, BLOCK + 5)).astype(np.float32)
    np.testing.assert_allclose(coordinate_median(updates), np.median(updates, axis=0), atol=1e-6)


def test_trimmed_mean_is_scipys() -> None:
    np.testing.assert_allclose(trimmed_mean(UPDATES, trim=2), stats.trim_mean(WIDE, 2 / 7, axis=0), atol=1e-6)
    with pytest.raises(RoundError, match="more than 6 updates, got 6"):
        trimmed_mean(UPDATES[:6], trim=3)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    found = geometric_median(UPDATES)

    def total(point: np.ndarray) -> float:
        return float(np.linalg.norm(WIDE - point, axis=1).sum())

    best = optimize.minimize(total, WIDE.mean(axis=0), method="BFGS", options={"gtol": 1e-9})
    assert total(found) <= best.fun * (1 + 1e-6)
    np.testing.assert_allclose(found, best.x, atol=1e-3)


def test_where_more_than_half_agree_they_are_the_geometric_median() -> None:
    updates = UPDATES.copy()
    updates[:4] = updates[0]
    np.testing.assert_allclose(geometric_median(updates), updates[0], atol=1e-6)


def test_centred_clipping_by_its_formula() -> None:
    centre = geometric_median(UPDATES).astype(np.float64)
    for _ in range(ITERATIONS):
        differences = WIDE - centre
        lengths = np.linalg.norm(differences, axis=1)
        centre = centre + (differences * np.minimum(1, np.median(lengths) / lengths)[:, None]).mean(axis=0)
    np.testing.assert_allclose(centred_clipping(UPDATES), centre, atol=1e-5)


def test_mixing_is_the_mean_of_the_nearest_by_plain_distances() -> None:
    expected = [WIDE[np.argsort(row)[:5]].mean(axis=0) for row in DISTANCES]
    np.testing.assert_allclose(nearest_neighbour_mixing(UPDATES, liars=2), expected, atol=1e-6)
    np.testing.assert_allclose(
        mixed_trimmed_mean(UPDATES, liars=2), stats.trim_mean(np.array(expected), 2 / 7, axis=0), atol=1e-6
    )


def test_mixing_small_differences_of_large_vectors_keeps_each_row_its_own_nearest() -> None:
    """Distances by squares lose small differences; Flower's Krum picked an attacker that way."""
    base = np.random.default_rng(1).normal(size=200) * 1e4
    rows = (base + np.random.default_rng(2).normal(size=(6, 200)) * 1e-3).astype(np.float32)
    mixed = nearest_neighbour_mixing(rows, liars=5)  # one neighbour: itself
    np.testing.assert_allclose(mixed, rows, atol=1e-6)


# --- rules that select


def test_distances_are_plain_ones() -> None:
    np.testing.assert_allclose(squared_distances(gram(UPDATES)), DISTANCES**2, rtol=1e-9, atol=1e-9)


def test_krum_scores_are_sums_of_squared_distances_to_the_nearest() -> None:
    expected = [np.sort(np.delete(row, i) ** 2)[: 7 - 2 - 2].sum() for i, row in enumerate(DISTANCES)]
    np.testing.assert_allclose(krum_scores(gram(UPDATES), liars=2), expected, rtol=1e-9)
    assert list(krum(UPDATES, liars=2)) == [int(np.argmin(expected))]
    assert list(multi_krum(UPDATES, liars=2)) == sorted(np.argsort(expected)[:5])


def test_spectral_scores_are_projections_on_the_singular_vector() -> None:
    rows = np.array([0, 2, 3, 5, 6])
    centred = WIDE[rows] - np.median(WIDE[rows], axis=0)
    _, _, vectors = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(spectral_scores(UPDATES, rows), (centred @ vectors[0]) ** 2, atol=1e-5)


def test_divide_and_conquer_drops_what_sticks_out_and_in_the_alert_state_always() -> None:
    rng = np.random.default_rng(5)
    quiet = (rng.choice([-1, 1], (12, 6)) @ rng.normal(size=(6, 400)) + rng.normal(size=(12, 400))).astype(np.float32)
    assert list(divide_and_conquer(quiet, gram(quiet), liars=2, alert=False)) == list(range(12))
    assert len(divide_and_conquer(quiet, gram(quiet), liars=2, alert=True)) == 10
    pushed = quiet.copy()
    pushed[[3, 8]] += np.random.default_rng(6).normal(size=400).astype(np.float32) * 20
    for alert in (False, True):
        assert list(divide_and_conquer(pushed, gram(pushed), liars=2, alert=alert)) == [
            i for i in range(12) if i not in (3, 8)
        ]


def test_a_few_huge_rows_do_not_hide_the_smaller_ones() -> None:
    updates = np.random.default_rng(7).normal(size=(20, 300)).astype(np.float32)
    direction = np.random.default_rng(8).normal(size=300).astype(np.float32)
    updates[0] += 1e4 * direction
    updates[1:4] -= 5 * direction
    assert list(divide_and_conquer(updates, gram(updates), liars=4, alert=False)) == list(range(4, 20))


def test_the_norm_gate_lets_through_what_is_short_and_a_number() -> None:
    norms = [1.0, 2.0, 2.0001, np.nan, np.inf]
    assert list(norm_gate(np.array(norms), largest=2.0)) == [True, True, False, False, False]
    assert list(norm_gate(np.array(norms), largest=np.inf)) == [True, True, True, False, False]


def test_copies_are_caught_and_honest_noise_is_not() -> None:
    assert not len(copies(gram(UPDATES)))
    updates = np.concatenate([WIDE, 0.4 * WIDE[2:3] + 0.01])
    assert sorted(copies(gram(updates))) == [2, 7]


def test_the_norm_gate_as_a_rule_measures_by_the_median() -> None:
    updates = UPDATES / np.linalg.norm(UPDATES, axis=1, keepdims=True)
    updates[3] *= 3.1
    updates[5] *= 2.9
    assert RULES["norm-gate"].decide(updates, np.ones(7), 1).kept == (0, 1, 2, 4, 5, 6)


# --- weights


def test_the_weighted_mean_is_numpys() -> None:
    weights = np.array([1, 2, 4, 1, 1, 2, 1])
    np.testing.assert_allclose(weighted_mean(UPDATES, weights), np.average(WIDE, axis=0, weights=weights), atol=1e-6)


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=30))
def test_no_site_has_more_than_a_quarter(weights: list[int]) -> None:
    shares = capped_shares(np.array(weights))
    cap = max(0.25, 1 / len(weights))
    assert shares.sum() == pytest.approx(1)
    assert shares.max() <= cap + 1e-9
    order = np.argsort(weights, kind="stable")
    assert (np.diff(shares[order]) >= -1e-12).all()  # who weighs more never counts for less
    free = shares < cap - 1e-9  # the others keep their proportions
    if free.any():
        ratios = shares[free] / np.array(weights)[free]
        assert ratios.max() == pytest.approx(ratios.min())


def test_shares_below_the_cap_are_the_weights() -> None:
    weights = np.array([4, 4, 2, 2, 2, 1, 1])
    np.testing.assert_allclose(capped_shares(weights), weights / weights.sum())
    np.testing.assert_allclose(capped_shares(np.array([4, 1, 1, 1, 1])), [0.25, *[0.1875] * 4])
    np.testing.assert_allclose(capped_shares(np.array([4, 2, 1])), [1 / 3] * 3)


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [1, np.nan]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(RoundError, match="positive"):
        capped_shares(np.array(weights))


# --- which rule


def test_which_rule_a_federation_gets() -> None:
    assert [default_rule(n) for n in (3, 5, 6, 20)] == ["mean", "mean", "nnm-trimmed-mean", "nnm-trimmed-mean"]
    for name, sites in (("mean", 2), ("nnm-trimmed-mean", 5)):
        with pytest.raises(ConfigError, match=f"needs at least .* got {sites}"):
            check_rule(name, sites=sites)
    with pytest.raises(ConfigError, match=r"known rules: centred-clipping, dnc, .* trimmed-mean"):
        check_rule("average", sites=6)


# --- the alert state


@pytest.mark.parametrize("sign", ["blamed", "gate_failed", "rolled_back"])
def test_a_sign_of_attack_makes_ten_rounds_alert(sign: str) -> None:
    quiet = Vigilance()
    assert not quiet.alert(1)
    assert advance(quiet, Evidence(4)) == quiet
    after = advance(quiet, Evidence(4, **{sign: True}))
    assert [after.alert(n) for n in (5, 4 + ALERT_ROUNDS, 5 + ALERT_ROUNDS)] == [True, True, False]
    longer = advance(after, Evidence(9, **{sign: True}))
    assert longer.alert(9 + ALERT_ROUNDS)
    assert advance(longer, Evidence(10)) == longer
    assert advance(longer, Evidence(2, **{sign: True})) == longer  # an old sign told late shortens nothing


def test_copies_and_those_who_push_together_are_left_out_by_name() -> None:
    rng = np.random.default_rng(2)
    spread = rng.choice([-1.0, 1.0], (20, 6)) @ rng.normal(size=(6, 512)) + 2 * rng.normal(size=(20, 512))
    updates = (2 * rng.normal(size=512) + spread).astype(np.float32)
    rule = RULES["dnc"]
    assert rule.tells
    pushed = updates.copy()
    pushed[:4] += 6 * rng.normal(size=512).astype(np.float32)
    assert rule.decide(pushed, np.ones(20), 4).kept == tuple(range(4, 20))
    copied = updates.copy()
    copied[11] = copied[12] + np.float32(1e-3)
    assert not {11, 12} & set(rule.decide(copied, np.ones(20), 4).kept)
    assert len(rule.decide(updates, np.ones(20), 4, alert=True).kept) == 16


def test_a_few_lies_that_agree_are_left_out_before_neighbours_are_mixed() -> None:
    """Where honest updates are nearly all noise, four that agree are each other's neighbours, and mixing keeps them."""
    rng = np.random.default_rng(5)
    shared = 0.1 * rng.normal(size=8192)
    updates = (shared + rng.normal(size=(20, 8192))).astype(np.float32)
    honest_mean = updates[4:].mean(axis=0)
    lie = rng.normal(size=8192)
    updates[:4] = 0.8 * lie + 0.6 * rng.normal(size=(4, 8192))
    decision = RULES["nnm-trimmed-mean"].decide(updates, np.ones(20), 4)
    assert decision.kept == tuple(range(4, 20))

    def along(delta_D: np.ndarray) -> float:
        return float((delta_D - honest_mean) @ lie / (lie @ lie))

    assert along(mixed_trimmed_mean(updates, liars=4)) > 0.1  # what it was without
    assert abs(along(decision.delta_D)) < 0.02
    few = RULES["nnm-trimmed-mean"].decide(updates[:9], np.ones(9), 4)
    assert few.kept == tuple(range(9))  # as many as the trimmed mean needs to tolerate four
    spent = RULES["nnm-trimmed-mean"].decide(updates, np.ones(20), 4, budget=1)
    assert len(spent.kept) == 19


def test_a_rule_that_mixes_still_trims_where_others_left_out_what_they_could() -> None:
    rng = np.random.default_rng(6)
    updates = rng.normal(size=(16, 512)).astype(np.float32)
    found = RULES["nnm-trimmed-mean"].decide(updates, np.ones(16), 4, budget=0)
    np.testing.assert_array_equal(found.delta_D, mixed_trimmed_mean(updates, liars=4))
