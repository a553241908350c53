"""What a round leaves out, and why; and when it is alert."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.rules.norm_gate import CLIP_ALLOWANCE
from aggregator.rules.selection import select
from aggregator.rules.vigilance import ALERT_ROUNDS, Evidence, Vigilance, advance

K = 512


def sketches(seed: int, sites: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    spread = rng.choice([-1.0, 1.0], (sites, 6)) @ rng.normal(size=(6, K)) + rng.normal(size=(sites, K))
    rows = spread.astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_each_gate_leaves_out_what_it_is_for() -> None:
    rows = sketches(0, 20)
    rows[3] *= CLIP_ALLOWANCE * 1.01
    rows[7] = np.nan
    rows[11] = rows[12] + 1e-3
    rows[15] = -rows[16:].sum(axis=0) * 0.5
    rows[15] /= np.linalg.norm(rows[15])
    found = select(rows, largest_norm=CLIP_ALLOWANCE, liars=4, alert=False)
    assert found.too_long == (3, 7)
    assert found.duplicates == (11, 12)
    assert set(found.outliers) <= {15}
    assert found.kept == tuple(i for i in range(20) if i not in {3, 7, 11, 12, *found.outliers})


def test_a_clean_round_loses_nothing_and_an_alert_one_as_many_as_could_lie() -> None:
    rows = sketches(1, 12)
    assert select(rows, largest_norm=2.0, liars=2, alert=False).kept == tuple(range(12))
    assert len(select(rows, largest_norm=2.0, liars=2, alert=True).outliers) == 2


def test_liars_that_push_together_are_left_out() -> None:
    rows = sketches(2, 20)
    direction = np.random.default_rng(3).normal(size=K)
    rows[:4] = 0.5 * rows[:4] + (direction / np.linalg.norm(direction)).astype(np.float32)
    rows[:4] *= 2
    assert select(rows, largest_norm=np.inf, liars=4, alert=False).outliers == (0, 1, 2, 3)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_every_row_is_in_one_place_and_no_more_are_dropped_than_allowed(
    seed: int, sites: int, long: int, alert: bool
) -> None:
    rows = sketches(seed, sites)
    rows[:long] *= 10
    found = select(rows, largest_norm=2.0, liars=3, alert=alert)
    everywhere = [*found.kept, *found.too_long, *found.duplicates, *found.outliers]
    assert sorted(everywhere) == list(range(sites))
    assert len(found.too_long) == min(long, sites)
    assert len(found.outliers) <= max(0, 3 - min(long, sites))


def test_the_order_of_rows_does_not_matter() -> None:
    rows = sketches(4, 10)
    rows[2] = -3 * rows[4]
    order = np.random.default_rng(5).permutation(10)
    first = select(rows, largest_norm=2.0, liars=2, alert=True)
    second = select(rows[order], largest_norm=2.0, liars=2, alert=True)
    assert sorted(order[list(second.kept)]) == list(first.kept)


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
