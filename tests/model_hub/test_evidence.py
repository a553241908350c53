"""The sequential tests: valid at every look, and strong enough to decide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_hub.evidence import (
    DEFAULT_THRESHOLDS,
    Decision,
    PairedOutcome,
    bernoulli_e,
    error_share_e,
    judge,
    judge_sites,
    mean_at_least_e,
)

T = DEFAULT_THRESHOLDS
HOUR = 3600.0


def outcomes(
    count: int,
    *,
    canary_errors: float = 0.0,
    control_errors: float = 0.0,
    difference: float = 0.0,
    seed: int = 0,
) -> list[PairedOutcome]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        failed, control_failed = rng.random() < canary_errors, rng.random() < control_errors
        control = float(rng.choice([0.0, 0.5, 1.0]))
        canary = float(np.clip(rng.choice([0.0, 0.5, 1.0]) + difference, 0, 1))
        made.append(
            PairedOutcome(failed, control_failed, 0.0 if failed else canary, 0.0 if control_failed else control)
        )
    return made


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-4, 0.01), st.integers(1, 60))
def test_too_many_errors_has_mean_at_most_one_under_its_null(rate: float, trials: int) -> None:
    """The exact expectation over all outcomes, not a simulation."""
    alternatives = [0.02, 0.05, 0.2, 0.6]
    expected = sum(
        math.comb(trials, k)
        * rate**k
        * (1 - rate) ** (trials - k)
        * bernoulli_e(k, trials, null=0.01, alternatives=alternatives)
        for k in range(trials + 1)
    )
    assert expected <= 1 + 1e-9


@settings(deadline=None, max_examples=60)
@given(st.floats(0.04, 0.6), st.integers(1, 60))
def test_few_errors_has_mean_at_most_one_under_its_null(rate: float, trials: int) -> None:
    alternatives = [0.04 * m for m in (0.05, 0.1, 0.2, 0.35, 0.5)]
    expected = sum(
        math.comb(trials, k)
        * rate**k
        * (1 - rate) ** (trials - k)
        * bernoulli_e(k, trials, null=0.04, alternatives=alternatives)
        for k in range(trials + 1)
    )
    assert expected <= 1 + 1e-9


@pytest.mark.parametrize("null", [-0.1, 0.01])
def test_bets_on_a_mean_are_fair_or_worse_under_the_null(null: float) -> None:
    """One round of the game: every bounded distribution with mean at most the null loses on average."""
    for low, high in ((-1.0, 1.0), (-0.5, 0.5), (null, null), (-1.0, 0.2)):
        share = 1.0 if high == low else (null - low) / (high - low)
        if 0 <= share <= 1:
            expected = share * mean_at_least_e([high], null=null) + (1 - share) * mean_at_least_e([low], null=null)
            assert expected <= 1 + 1e-12


def test_looking_after_every_request_rarely_condemns_a_healthy_canary() -> None:
    condemned = 0
    for seed in range(150):
        made = outcomes(300, canary_errors=0.01, control_errors=0.01, seed=seed)
        condemned += any(
            judge(made[:n], elapsed_s=HOUR, thresholds=T).decision is Decision.ROLL_BACK for n in range(10, 301, 10)
        )
    assert condemned / 150 <= 0.03


def test_a_canary_as_bad_as_the_promote_null_is_rarely_promoted() -> None:
    promoted = 0
    for seed in range(150):
        made = outcomes(300, canary_errors=0.05, control_errors=0.0, seed=seed)
        promoted += any(
            judge(made[:n], elapsed_s=HOUR, thresholds=T).decision is Decision.PROMOTE for n in range(100, 301, 20)
        )
    assert promoted / 150 <= 0.06


def test_a_crashing_canary_is_condemned_for_its_errors_within_a_few_requests() -> None:
    verdict = judge(outcomes(10, canary_errors=1.0), elapsed_s=60.0, thresholds=T)
    assert verdict.decision is Decision.ROLL_BACK
    assert verdict.reason.startswith("errors")


def test_an_outage_of_both_arms_does_not_condemn_the_canary() -> None:
    made = outcomes(200, canary_errors=0.1, control_errors=0.1, seed=3)
    verdict = judge(made, elapsed_s=HOUR, thresholds=T)
    assert verdict.e_too_many_errors > 100
    assert verdict.e_more_errors_than_control < 10
    assert "control arm's" not in verdict.reason


def test_a_fluent_but_worse_canary_is_condemned_for_its_reward() -> None:
    verdict = judge(outcomes(120, difference=-0.4, seed=1), elapsed_s=HOUR, thresholds=T)
    assert verdict.decision is Decision.ROLL_BACK
    assert verdict.reason.startswith("reward")
    assert verdict.canary_errors == 0


def test_a_better_canary_is_promoted_but_not_before_its_time() -> None:
    made = outcomes(200, difference=0.4, seed=2)
    assert judge(made, elapsed_s=HOUR, thresholds=T).decision is Decision.PROMOTE
    assert judge(made, elapsed_s=60.0, thresholds=T).decision is Decision.WAIT
    assert judge(made[:99], elapsed_s=HOUR, thresholds=T).decision is Decision.WAIT


def reports(
    sites: int, *, lie: list[PairedOutcome] | None = None, seed: int = 0, **truth: float
) -> dict[str, list[PairedOutcome]]:
    """What sites say about one canary; the last one may lie."""
    made = {f"site-{i}": outcomes(200, seed=seed * 100 + i, **truth) for i in range(sites)}
    if lie is not None:
        made[f"site-{sites - 1}"] = lie
    return made


PRAISE = [PairedOutcome(False, True, 1.0, 0.0)] * 200
BLAME = [PairedOutcome(True, False, 0.0, 1.0)] * 200


@pytest.mark.parametrize("seed", range(5))
def test_one_lying_site_neither_condemns_nor_promotes(seed: int) -> None:
    def decision(**arguments: object) -> Decision:
        by_site = reports(6, seed=seed, **arguments)  # type: ignore[arg-type]
        return judge_sites(by_site, liars=1, elapsed_s=HOUR, thresholds=T).decision

    assert decision(difference=0.3, lie=BLAME) is Decision.PROMOTE
    assert decision(difference=-0.3, lie=PRAISE) is Decision.ROLL_BACK
    assert decision(canary_errors=0.5, lie=PRAISE) is Decision.ROLL_BACK
    assert decision(difference=0.0, canary_errors=0.0, lie=BLAME) is not Decision.ROLL_BACK


@pytest.mark.parametrize(
    ("loss", "wrong"), [(T.promote_margin, Decision.PROMOTE), (T.worse_tolerance, Decision.ROLL_BACK)]
)
def test_leaving_reports_out_keeps_both_errors_rare_at_their_nulls(loss: float, wrong: Decision) -> None:
    """A canary exactly at the margin is rarely promoted, one exactly at the tolerance rarely condemned."""
    rng = np.random.default_rng(0)
    mistakes = 0
    for _ in range(150):
        by_site: dict[str, list[PairedOutcome]] = {f"site-{i}": [] for i in range(6)}
        for _window in range(8):
            for made in by_site.values():
                control = rng.choice([0.3, 0.5, 0.7], 20)
                canary = control - loss + rng.choice([-0.2, 0.2], 20)
                made += [PairedOutcome(False, False, float(a), float(b)) for a, b in zip(canary, control, strict=True)]
            verdict = judge_sites(by_site, liars=1, elapsed_s=HOUR, thresholds=T)
            mistakes += verdict.decision is wrong
            if verdict.decision is not Decision.WAIT:
                break
    assert mistakes / 150 <= 0.06


def test_without_liars_all_reports_count() -> None:
    by_site = reports(3, difference=0.2)
    verdict = judge_sites(by_site, liars=0, elapsed_s=HOUR, thresholds=T)
    everything = judge([o for made in by_site.values() for o in made], elapsed_s=HOUR, thresholds=T)
    assert (verdict.decision, verdict.requests) == (everything.decision, 600)
    assert verdict.mean_reward_difference == pytest.approx(everything.mean_reward_difference)
    assert judge_sites({}, liars=0, elapsed_s=HOUR, thresholds=T).requests == 0
    assert judge_sites({"site-1": []}, liars=1, elapsed_s=HOUR, thresholds=T).decision is Decision.WAIT


def test_without_traffic_there_is_no_verdict_and_in_the_end_no_promotion() -> None:
    assert judge([], elapsed_s=HOUR, thresholds=T).decision is Decision.WAIT
    undecided = judge([], elapsed_s=T.maximum_time_s, thresholds=T)
    assert undecided.decision is Decision.ROLL_BACK
    assert "not proven" in undecided.reason


def test_evidence_stays_a_finite_number_and_starts_at_one() -> None:
    assert mean_at_least_e([], null=0.0) == 1.0
    assert error_share_e(0, 0, T) == 1.0
    assert math.isfinite(mean_at_least_e([1.0] * 5000, null=-0.1))
    assert math.isfinite(bernoulli_e(5000, 5000, null=0.01, alternatives=[0.6]))
