"""The cohort's bookkeeping, and when a site is suspended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.cohort import EXCLUSIONS, WITHIN_ROUNDS, Accepted, Cohort, suspension, suspensions
from common.update import Refusal

ROSTER = tuple("abcde")


def accepted() -> Accepted:
    return Accepted(np.zeros(1, np.float32), None)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*ROSTER, "x"]), st.booleans()), max_size=12), st.sets(st.sampled_from("ab")))
def test_each_site_is_settled_once_and_all_are_accounted_for(said: list[tuple[str, bool]], excluded: set[str]) -> None:
    cohort = Cohort(1, ROSTER, 3, dict.fromkeys(excluded, "three exclusions"))
    for site, usable in said:
        known = site in cohort.unsettled
        before = (dict(cohort.accepted), dict(cohort.refused))
        settle = cohort.accept if usable else lambda site, _: cohort.refuse(Refusal(site, "validate", "nan"))
        if known:
            settle(site, accepted())
        else:
            with pytest.raises(ValueError, match="is settled in round 1, or not of its roster"):
                settle(site, accepted())
            assert (cohort.accepted, cohort.refused) == before
        parts = [set(cohort.accepted), set(cohort.refused), set(cohort.unsettled)]
        assert sorted(name for part in parts for name in part) == sorted(ROSTER)
        assert cohort.has_quorum == (len(cohort.accepted) >= 3)
        assert cohort.is_hopeless == (len(cohort.accepted) + len(cohort.unsettled) < 3)
        assert not (cohort.has_quorum and cohort.is_hopeless)
    assert not excluded & set(cohort.accepted)


@settings(deadline=None)
@given(st.sets(st.integers(1, 60)), st.integers(1, 61), st.integers(0, 30))
def test_suspended_is_who_had_three_exclusions_within_ten_rounds_since_it_was_let_in(
    rounds: set[int], number: int, readmitted_after: int
) -> None:
    exclusions = {r: Refusal("a", "validate", f"reason {r}") for r in rounds}
    reason = suspension(exclusions, number=number, readmitted_after=readmitted_after)
    windows = [
        [r for r in rounds if first <= r < first + WITHIN_ROUNDS and readmitted_after < r < number]
        for first in range(1, 61)
    ]
    assert (reason is not None) is any(len(window) >= EXCLUSIONS for window in windows)


def test_a_suspension_lasts_until_somebody_looked() -> None:
    exclusions = {r: Refusal("a", "validate", "nan") for r in (1, 2, 10)}
    for number in (11, 30, 500):
        assert suspension(exclusions, number=number) == (
            "excluded in rounds 1, 2, 10 (nan); an operator has to look and readmit it"
        )
    assert suspension(exclusions, number=10) is None
    assert suspension({1: exclusions[1], 2: exclusions[2], 11: exclusions[10]}, number=12) is None
    assert suspension(exclusions, number=11, readmitted_after=1) is None


def test_rounds_in_which_a_site_was_not_asked_do_not_count() -> None:
    """In a secure mode a site that is left out takes no part until its window of ten rounds ends."""
    exclusions = {r: Refusal("a", "select", "it nearly repeats another upload") for r in (1, 11, 21)}
    out = [r for r in range(1, 40) if r not in exclusions]
    reason = suspension(exclusions, number=22, out=out)
    assert reason is not None and reason.startswith("excluded in rounds 1, 11, 21 ")
    assert suspension(exclusions, number=22) is None
    assert suspension(exclusions, number=22, out=[r for r in out if not 2 <= r <= 9]) is None
    found = suspensions({"a": exclusions}, number=22, readmitted_after={}, selected_at_most=1, out={"a": out})
    assert found == {"a": reason}


@pytest.mark.parametrize(
    ("at_most", "expected"), [(0, ["d"]), (1, ["c", "d"]), (2, ["a", "c", "d"]), (9, ["a", "b", "c", "d"])]
)
def test_a_selection_alone_suspends_no_more_sites_than_could_lie(at_most: int, expected: list[str]) -> None:
    def left_out(*rounds: int, stage: str = "select") -> dict[int, Refusal]:
        return {r: Refusal("x", stage, "left out by dnc") for r in rounds}

    exclusions = {
        "a": left_out(1, 2, 3),
        "b": left_out(4, 5, 6),
        "c": left_out(1, 2, 3, 4),
        "d": left_out(1, 2, 3, stage="validate"),
        "e": {**left_out(1, 2), **left_out(30, stage="validate")},
    }
    found = suspensions(exclusions, number=40, readmitted_after={}, selected_at_most=at_most)
    assert sorted(found) == expected
    assert "c" not in suspensions(exclusions, number=40, readmitted_after={"c": 4}, selected_at_most=9)


def test_the_status_of_a_large_round_is_one_short_line() -> None:
    roster = tuple(f"site-{n:03}" for n in range(500))
    cohort = Cohort(7, roster, 251)
    text = str(cohort.status(there=frozenset(roster[:400]), left_s=60.0))
    assert text.startswith("round 7: 0 updates, 251 needed, waiting for site-000, site-001")
    assert "and 395 more, not there: site-400" in text
    assert len(text) < 250
