"""Evidence for or against a canary: sequential tests that may be looked at any time.

An e-process has mean at most 1 while its null hypothesis holds, so it exceeds
1/α with probability at most α, ever (Ville 1939); looking after every request
costs nothing. Three of them decide:

* errors against fixed rates: likelihood-ratio mixtures for `p ≤ 1 %` (roll back)
  and `p ≥ 4 %` (promote);
* errors against the control arm: the canary's share of all errors, which an
  outage of both arms does not move (Lindon & Malek 2020, arXiv:2011.03567);
* reward, paired by prompt: bets on a bounded mean (Waudby-Smith & Ramdas 2020,
  arXiv:2010.09686).

An error is a failed, empty or non-finite answer, or an invalid tool call.
Pure functions; time comes in as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class PairedOutcome:
    """One public prompt answered by both arms; an error counts as reward 0."""

    canary_error: bool
    control_error: bool
    canary_reward: float
    control_reward: float


@dataclass(frozen=True)
class Thresholds:
    """Parameters of the tests.

    Attributes:
        healthy_error_rate, bad_error_rate: null of the roll-back and of the promote test.
        roll_back_alpha, promote_alpha: error probabilities of the two kinds of decision.
        error_ratio: canary errors may be this many times the control's.
        worse_tolerance: mean reward loss that still counts as healthy.
        promote_margin: mean reward loss that must be ruled out before promotion.
        minimum_requests, minimum_time_s: before promotion.
        maximum_requests, maximum_time_s: undecided at either means roll back: not proven.
    """

    healthy_error_rate: float = 0.01
    bad_error_rate: float = 0.04
    roll_back_alpha: float = 0.01
    promote_alpha: float = 0.05
    error_ratio: float = 2.0
    worse_tolerance: float = 0.01
    promote_margin: float = 0.05
    minimum_requests: int = 100
    minimum_time_s: float = 15 * 60
    maximum_requests: int = 3000
    maximum_time_s: float = 24 * 3600


DEFAULT_THRESHOLDS = Thresholds()


class Decision(StrEnum):
    """What to do with a canary now."""

    PROMOTE = "promote"
    ROLL_BACK = "roll back"
    WAIT = "not enough evidence"


@dataclass(frozen=True)
class Verdict:
    """A decision with its figures: e-values are evidence against the named null, 1 is none."""

    decision: Decision
    reason: str
    requests: int
    canary_errors: int
    control_errors: int
    mean_reward_difference: float
    e_too_many_errors: float
    e_few_errors: float
    e_more_errors_than_control: float
    e_worse_reward: float
    e_no_worse_reward: float


_WORSE_RATES = (2, 3, 5, 8, 13, 20, 35, 60)
_BETTER_RATES = (0.05, 0.1, 0.2, 0.35, 0.5)
_SHARE_RATIOS = (1.5, 2, 4, 8, 16, 32)
_BETS = (0.05, 0.1, 0.2, 0.4, 0.8)
_LARGEST_E = 1e12


def bernoulli_e(events: int, trials: int, *, null: float, alternatives: Iterable[float]) -> float:
    """Mixture likelihood ratio of `events` in `trials` against rate `null`.

    Valid for the composite null on the far side of `null` from all alternatives.
    """
    logs = [events * math.log(p / null) + (trials - events) * math.log((1 - p) / (1 - null)) for p in alternatives]
    return _mean_exp(logs)


def mean_at_least_e(values: Sequence[float], *, null: float) -> float:
    """E-process against the null that the mean of `values` (each in [-1, 1]) is at most `null`."""
    return _mean_exp([sum(math.log1p(bet / (1 + null) * (value - null)) for value in values) for bet in _BETS])


def error_share_e(canary_errors: int, control_errors: int, thresholds: Thresholds) -> float:
    """Evidence that the canary errs more than `error_ratio` times as often as the control.

    Both arms answer the same prompts, so each error is the canary's with
    probability ratio / (ratio + 1) at the null.
    """
    ratio = thresholds.error_ratio
    return bernoulli_e(
        canary_errors,
        canary_errors + control_errors,
        null=ratio / (ratio + 1),
        alternatives=[ratio * more / (ratio * more + 1) for more in _SHARE_RATIOS],
    )


def judge(outcomes: Sequence[PairedOutcome], *, elapsed_s: float, thresholds: Thresholds) -> Verdict:
    """Promote, roll back, or wait, from all outcomes of a canary so far."""
    t = thresholds
    requests = len(outcomes)
    canary_errors = sum(o.canary_error for o in outcomes)
    control_errors = sum(o.control_error for o in outcomes)
    differences = [o.canary_reward - o.control_reward for o in outcomes]
    too_many = bernoulli_e(
        canary_errors,
        requests,
        null=t.healthy_error_rate,
        alternatives=[r for m in _WORSE_RATES if (r := t.healthy_error_rate * m) < 0.95],
    )
    few = bernoulli_e(
        canary_errors, requests, null=t.bad_error_rate, alternatives=[t.bad_error_rate * m for m in _BETTER_RATES]
    )
    relative = error_share_e(canary_errors, control_errors, t)
    worse = mean_at_least_e([-d for d in differences], null=t.worse_tolerance)
    no_worse = mean_at_least_e(differences, null=-t.promote_margin)
    decision, reason = _decide(
        t, requests, elapsed_s, too_many=too_many, few=few, relative=relative, worse=worse, no_worse=no_worse
    )
    return Verdict(
        decision=decision,
        reason=reason,
        requests=requests,
        canary_errors=canary_errors,
        control_errors=control_errors,
        mean_reward_difference=sum(differences) / requests if requests else 0.0,
        e_too_many_errors=too_many,
        e_few_errors=few,
        e_more_errors_than_control=relative,
        e_worse_reward=worse,
        e_no_worse_reward=no_worse,
    )


def tolerated_reports(sites: int) -> int:
    """⌊(n − 1) / 4⌋ false reports among those of n sites; below five sites there is nobody to outvote a liar."""
    return max(0, (sites - 1) // 4)


def judge_sites(
    by_site: Mapping[str, Sequence[PairedOutcome]], *, liars: int, elapsed_s: float, thresholds: Thresholds
) -> Verdict:
    """`judge`, on the reports of sites of which up to `liars` may be false.

    Sites are ordered by how the canary did there, and the `liars` best and the
    `liars` worst are left out, as in a trimmed mean: a liar at either end neither
    forces a decision nor prevents one. With `liars` = 0 all reports count. Leaving
    out is symmetric, so the error probabilities of `judge` carry over up to the
    asymmetry of the reports; the tests measure them at both nulls.
    """
    ordered = sorted(by_site, key=lambda site: (_standing(by_site[site]), site))
    outcomes = [outcome for site in ordered[liars : len(ordered) - liars] for outcome in by_site[site]]
    return judge(outcomes, elapsed_s=elapsed_s, thresholds=thresholds)


def _standing(outcomes: Sequence[PairedOutcome]) -> float:
    """How the canary did at one site, against the control; 0 for no reports."""
    total = sum(o.canary_reward - o.control_reward - float(o.canary_error) + float(o.control_error) for o in outcomes)
    return total / len(outcomes) if outcomes else 0.0


def _decide(
    t: Thresholds,
    requests: int,
    elapsed_s: float,
    *,
    too_many: float,
    few: float,
    relative: float,
    worse: float,
    no_worse: float,
) -> tuple[Decision, str]:
    against = 1 / t.roll_back_alpha
    doubt = math.sqrt(against)
    if relative >= against:
        return Decision.ROLL_BACK, f"errors: more than {t.error_ratio:g} times those of the control arm"
    if too_many >= against and relative >= doubt:
        return Decision.ROLL_BACK, f"errors: above {t.healthy_error_rate:.0%}, and more than the control arm's"
    if too_many >= against**2:
        return Decision.ROLL_BACK, f"errors: far above {t.healthy_error_rate:.0%}, whatever the control arm does"
    if worse >= against:
        return Decision.ROLL_BACK, "reward: worse than the control arm on the same prompts"
    proven = few >= 1 / t.promote_alpha and no_worse >= 1 / t.promote_alpha
    quiet = too_many < doubt and relative < doubt and worse < doubt
    enough = requests >= t.minimum_requests and elapsed_s >= t.minimum_time_s
    if proven and quiet and enough:
        return Decision.PROMOTE, f"errors below {t.bad_error_rate:.0%} and reward not worse"
    if requests >= t.maximum_requests or elapsed_s >= t.maximum_time_s:
        return Decision.ROLL_BACK, f"not proven within {requests} requests"
    return Decision.WAIT, "not enough evidence yet"


def _mean_exp(logs: Sequence[float]) -> float:
    """Mean of exponentials, capped so that it stays a finite number."""
    largest = max(logs)
    log_mean = largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))
    return math.exp(min(log_mean, math.log(_LARGEST_E)))
