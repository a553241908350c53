"""What every aggregation rule must do, whatever it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.rules import RULES, columns, tolerated_liars
from common.errors import RoundError

ROBUST = [name for name in RULES if name != "mean"]
SELECTING = [name for name, rule in RULES.items() if rule.estimating is None]
D = 20

seeds, sizes = st.integers(0, 10_000), st.integers(5, 12)


def drawn(seed: int, sites: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(sites, D)).astype(np.float32)


def combined(name: str, updates: np.ndarray, weights: np.ndarray | None = None, *, alert: bool = False) -> np.ndarray:
    weights = np.ones(len(updates)) if weights is None else weights
    return RULES[name].decide(updates, weights, tolerated_liars(len(updates)), alert=alert).delta_D


# --- for all rules


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=12)
@given(seeds, sizes)
def test_the_order_of_sites_does_not_matter(name: str, seed: int, sites: int) -> None:
    updates = drawn(seed, sites)
    order = np.random.default_rng(seed + 1).permutation(sites)
    np.testing.assert_allclose(combined(name, updates), combined(name, updates[order]), atol=1e-5)


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=12)
@given(seeds, sizes, st.booleans())
def test_the_result_is_float32_and_within_the_range_of_what_was_sent(
    name: str, seed: int, sites: int, alert: bool
) -> None:
    updates = drawn(seed, sites)
    result = combined(name, updates, alert=alert)
    assert result.dtype == np.float32
    assert result.shape == (D,)
    assert (result <= updates.max(axis=0) + 1e-5).all()
    assert (result >= updates.min(axis=0) - 1e-5).all()


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=12)
@given(seeds, st.integers(6, 12), st.sampled_from([-3.0, -0.01, 0.5, 100.0]), st.sampled_from([0.0, 1.0, -20.0]))
def test_scaled_and_moved_updates_make_a_scaled_and_moved_result(
    name: str, seed: int, sites: int, scale: float, shift: float
) -> None:
    """But for the norm gate, which measures from zero."""
    updates = drawn(seed, sites)
    offset = 0.0 if name == "norm-gate" else shift * np.random.default_rng(seed + 1).normal(size=D)
    moved = (scale * updates + offset).astype(np.float32)
    expected = scale * combined(name, updates) + offset
    np.testing.assert_allclose(combined(name, moved), expected, atol=1e-4 * (abs(scale) + np.abs(offset).max()))


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=12)
@given(st.floats(-5, 5, width=32), sizes)
def test_sites_that_agree_are_followed(name: str, value: float, sites: int) -> None:
    updates = np.tile((value * np.linspace(0.5, 1, D)).astype(np.float32), (sites, 1))
    np.testing.assert_allclose(combined(name, updates), updates[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_the_same_updates_make_the_same_bytes_on_any_number_of_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = np.random.default_rng(3).normal(size=(9, 2 * columns.BLOCK + 77)).astype(np.float32)
    updates.flags.writeable = False  # no rule writes into what it was given
    results = []
    for threads in (1, 4, 4):
        monkeypatch.setattr(columns, "THREADS", threads)
        results.append(combined(name, updates).tobytes())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", RULES)
def test_blocks_do_not_show_in_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = np.random.default_rng(4).normal(size=(8, 257)).astype(np.float32)
    whole = combined(name, updates)
    for size in (1, 64, 256):
        monkeypatch.setattr(columns, "BLOCK", size)
        monkeypatch.setattr("aggregator.rules.mean.BLOCK", size)
        np.testing.assert_allclose(combined(name, updates), whole, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_never_comes_out(name: str, bad: float) -> None:
    """Opening refuses such an update; where one gets here all the same, it is left out or the round is."""
    for site in range(9):
        updates = drawn(0, 9)
        updates[site, 3] = bad
        with np.errstate(all="ignore"):
            try:
                result = combined(name, updates)
            except RoundError as error:
                assert "not finite" in str(error) or "every update" in str(error)
            else:
                assert np.isfinite(result).all()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tolerated", [1, 2, 4])
def test_too_few_updates_are_refused(name: str, tolerated: int) -> None:
    rule = RULES[name]
    needed = rule.minimum_updates(tolerated)
    enough = drawn(0, needed)
    assert rule.decide(enough, np.ones(needed), tolerated).delta_D.shape == (D,)
    with pytest.raises(RoundError, match=f"at least {needed} updates to tolerate {tolerated}, got {needed - 1}"):
        rule.decide(enough[1:], np.ones(needed - 1), tolerated)


# --- against liars


LIES = ("far", "far together", "flipped", "copies", "in the middle", "one coordinate", "just outside", "each its own")


def lies(kind: str, honest: np.ndarray, count: int, size: float, rng: np.random.Generator) -> np.ndarray:
    mean, direction = honest.mean(axis=0), rng.choice([-1.0, 1.0], D)
    farthest = np.linalg.norm(honest - mean, axis=1).max()
    made = {
        "far": lambda: size * rng.choice([-1.0, 1.0], (count, D)),
        "far together": lambda: np.tile(size * direction, (count, 1)),
        "flipped": lambda: np.tile(-size * mean, (count, 1)),
        "copies": lambda: np.tile(honest[0], (count, 1)),
        "in the middle": lambda: np.tile(mean, (count, 1)),
        "one coordinate": lambda: mean + size * np.eye(D)[:count],
        "just outside": lambda: np.tile(mean + 1.2 * farthest * direction / np.sqrt(D), (count, 1)),
        "each its own": lambda: np.array([mean + size * 10.0**-i * direction for i in range(count)]),
    }
    return made[kind]().astype(np.float32)


def proven_bound(name: str, honest: np.ndarray, n: int, f: int) -> float:
    """How far the result can be from the honest mean, whatever the f others send.

    r: largest honest distance to the mean; d: largest between two honest; w: length of the honest ranges. The first
    two rules stay within each coordinate's range, which is checked apart.
    """
    wide = honest.astype(np.float64)
    r = np.linalg.norm(wide - wide.mean(axis=0), axis=1).max()
    d = np.linalg.norm(wide[:, None] - wide[None], axis=2).max()
    w = np.linalg.norm(np.ptp(wide, axis=0))
    if name in ("median", "trimmed-mean"):
        return float(w)
    if name == "nnm-trimmed-mean":  # of n − f rows within d of an honest one, then within their range
        return float(np.sqrt(D) * (r + d))
    if name in ("krum", "multi-krum"):  # the score of the kept is at most an honest one's
        return float(r + d * np.sqrt((n - f - 2) / (n - 2 * f - 1)))
    if name == "dnc":  # normal: within 3 d of an honest row; alert: no projection above an honest one
        return float(max(3 * d + 2 * r, np.sqrt(n) * (r + w) + w))
    if name == "norm-gate":
        return float(3.0 * np.linalg.norm(wide, axis=1).max() + np.linalg.norm(wide.mean(axis=0)))
    distance = 2 * (n - f) / (n - 2 * f) * r  # the geometric median's
    if name == "centred-clipping":
        for _ in range(5):  # each step adds at most (f/n) radius, and the radius is at most distance + r
            distance = (1 + f / n) * (distance + r)
    return float(distance)


@pytest.mark.parametrize("name", ROBUST)
@settings(deadline=None, max_examples=40)
@given(seeds, st.integers(5, 16), st.sampled_from(LIES), st.sampled_from([1.0, 3.0, 1e2, 1e4]), st.booleans())
def test_liars_move_the_result_no_farther_than_is_proven(
    name: str, seed: int, n: int, kind: str, size: float, alert: bool
) -> None:
    """For lies up to 10,000 times an honest norm: validation bounds every norm by the clip before a rule sees it."""
    f = tolerated_liars(n)
    rng = np.random.default_rng(seed)
    honest = (rng.normal(size=D) * rng.choice([0.0, 1.0, 5.0]) + rng.normal(size=(n - f, D))).astype(np.float32)
    updates = np.concatenate([honest, lies(kind, honest, f, size, rng)])[rng.permutation(n)]
    result = combined(name, updates, alert=alert)
    assert np.linalg.norm(result - honest.mean(axis=0)) <= 1.01 * proven_bound(name, honest, n, f)
    if name in ("median", "trimmed-mean"):
        assert (result <= honest.max(axis=0) + 1e-5).all()
        assert (result >= honest.min(axis=0) - 1e-5).all()


@pytest.mark.parametrize("name", ROBUST)
@settings(deadline=None, max_examples=10)
@given(seeds)
def test_a_lie_far_away_has_no_more_weight_than_one_site(name: str, seed: int) -> None:
    """The plain mean follows it anywhere."""
    updates = drawn(seed, 9)
    updates[4] = 1e6
    assert np.abs(combined("mean", updates)).max() > 1e5
    honest = np.delete(updates, 4, axis=0)
    assert np.linalg.norm(combined(name, updates) - honest.mean(axis=0)) < 6.0


@pytest.mark.parametrize("name", [name for name in ROBUST if name != "norm-gate"])
@settings(deadline=None, max_examples=10)
@given(seeds)
def test_the_result_is_close_to_the_honest_mean_under_a_lie_within_the_norm(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    signal = rng.normal(size=D) * 2
    updates = (signal + rng.normal(size=(6, D)) * 0.3).astype(np.float32)
    updates[0] = -updates[0]
    honest_mean = updates[1:].mean(axis=0)
    assert np.linalg.norm(combined(name, updates) - honest_mean) < np.linalg.norm(
        combined("mean", updates) - honest_mean
    )


# --- weights


@pytest.mark.parametrize("name", SELECTING)
@settings(deadline=None, max_examples=12)
@given(seeds, st.lists(st.sampled_from([1, 2, 4]), min_size=9, max_size=12), st.booleans())
def test_what_is_selected_is_averaged_by_contract_weights(
    name: str, seed: int, weights: list[int], alert: bool
) -> None:
    updates = drawn(seed, len(weights))
    decision = RULES[name].decide(updates, np.array(weights), tolerated_liars(len(weights)), alert=alert)
    kept = list(decision.kept)
    shares = np.array(weights, float)[kept] / np.array(weights)[kept].sum()
    if shares.max() <= 0.25:  # else it is capped
        np.testing.assert_allclose(decision.delta_D, shares @ updates[kept].astype(np.float64), atol=1e-6)
    assert len(kept) >= 1
    assert kept == sorted(set(kept))


@pytest.mark.parametrize("name", [name for name in RULES if name not in SELECTING])
@settings(deadline=None, max_examples=10)
@given(seeds, st.lists(st.sampled_from([1, 2, 4]), min_size=6, max_size=12))
def test_rules_that_make_their_own_result_ignore_weights_and_name_whom_they_work_on(
    name: str, seed: int, weights: list[int]
) -> None:
    updates = drawn(seed, len(weights))
    np.testing.assert_array_equal(combined(name, updates, np.array(weights)), combined(name, updates))
    decision = RULES[name].decide(updates, np.array(weights), tolerated_liars(len(weights)))
    if RULES[name].selecting is None:
        assert decision.kept == tuple(range(len(weights)))
    else:
        assert len(weights) - tolerated_liars(len(weights)) <= len(set(decision.kept)) == len(decision.kept)


def test_tolerated_liars_grow_with_the_federation() -> None:
    assert [tolerated_liars(n) for n in (3, 5, 6, 8, 9, 12, 13, 20)] == [1, 1, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_works_in_the_smallest_federation_it_is_for(name: str) -> None:
    rule = RULES[name]
    assert rule.minimum_updates(tolerated_liars(rule.minimum_sites)) <= rule.minimum_sites
