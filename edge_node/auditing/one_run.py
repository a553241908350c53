"""A4: a lower bound on ε from one run with many canaries.

Steinke, Nasr & Jagielski 2023, "Privacy Auditing with One (1) Training Run",
arXiv:2305.08846. Each of m canaries is included with probability ½; guesses are
made from what was released; an (ε, δ)-DP mechanism bounds how many can be right.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from scipy import stats

from common.accounting import PrivateSteps, epsilon
from edge_node.auditing.mechanism import AuditedMechanism
from edge_node.auditing.statement import Check, Figure
from edge_node.training.noise import SecureRandom

CONFIDENCE = 0.95
_GUESSED_SHARES = (0.02, 0.1, 0.3, 1.0)
"""Shares of the canaries that are guessed, fixed beforehand; the error probability is divided among them."""
_LARGEST_EPSILON = 64.0
_CANARY_NORM = 1e3
"""Of a canary's gradient, relative to C: what is left of it is the clip's work."""
_ROWS = 256
_VALUES = 1.5e9
"""Gradient values one run may clip, about 25 s on one core."""
_FEWEST_CANARIES = 200


def p_value(*, right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound on the probability of `right` or more right guesses under (ε, δ)-DP (Theorem 5.2 of the paper).

    β + 2mδ·α with β = P[B ≥ v], α = max_i P[v > B ≥ v - i] / i, for B ~ Binomial(r, e^ε / (1 + e^ε)).
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses about {canaries} canaries is not possible")
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(right - 1, guesses, accuracy))
    if right == 0:
        return 1.0
    below_V = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, accuracy))
    alpha = float(np.max(below_V / np.arange(1, right + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def epsilon_lower_bound(*, right: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    """The largest ε (to 1e-3) that the guesses refute at `confidence`; 0 where they refute none."""

    def refuted(candidate: float) -> bool:
        found = p_value(right=right, guesses=guesses, canaries=canaries, epsilon=candidate, delta=delta)
        return found < 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _LARGEST_EPSILON
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def right_guesses(scores_M: np.ndarray, included_M: np.ndarray, guesses: int) -> int:
    """How many are right when the highest scores are called included and the lowest left out."""
    order = np.argsort(scores_M, kind="stable")
    called_out = guesses // 2
    called_in = guesses - called_out
    return int(included_M[order[len(order) - called_in :]].sum() + (~included_M[order[:called_out]]).sum())


def lower_bound_of(scores_M: np.ndarray, included_M: np.ndarray, *, delta: float) -> float:
    """The best lower bound on ε over the fixed numbers of guesses, all together at `CONFIDENCE`."""
    canaries = len(scores_M)
    each = 1 - (1 - CONFIDENCE) / len(_GUESSED_SHARES)
    bounds = []
    for share in _GUESSED_SHARES:
        guesses = max(1, int(share * canaries))
        right = right_guesses(scores_M, included_M, guesses)
        bounds.append(
            epsilon_lower_bound(right=right, guesses=guesses, canaries=canaries, delta=delta, confidence=each)
        )
    return max(bounds)


def ceiling(canaries: int, *, delta: float) -> float:
    """The bound that many canaries would give if every guess were right: no run can show more."""
    everyone = np.arange(canaries) >= canaries // 2
    return lower_bound_of(everyone.astype(np.float64), everyone, delta=delta)


def canary_scores(mechanism: AuditedMechanism, included_M: np.ndarray) -> np.ndarray:
    """Sum over the steps of what was released on each canary's own coordinate, relative to C.

    Canary j has its gradient in coordinate j alone; it is sampled, clipped, summed and
    noised by the code that trains, in a model of as many values as there are canaries.
    """
    canaries = len(included_M)
    secret = SecureRandom()
    scores_M = np.zeros(canaries)
    for _ in range(mechanism.event.steps):
        drawn = np.flatnonzero(secret.bernoulli(mechanism.event.sampling_rate, canaries) & included_M)
        total = mechanism.empty_sum(canaries)
        for start in range(0, len(drawn), _ROWS):
            rows = torch.from_numpy(drawn[start : start + _ROWS])
            gradients_UD = torch.zeros(len(rows), canaries)
            gradients_UD[torch.arange(len(rows)), rows] = _CANARY_NORM * mechanism.clip_norm
            total.add(gradients_UD)
        scores_M += total.release(secret).numpy() / mechanism.clip_norm
    return scores_M


def affordable_canaries(event: PrivateSteps, *, most: int) -> int:
    """Canaries whose clipping stays within a fixed amount of work: T·q·m/2 gradients of m values."""
    affordable = math.sqrt(2 * _VALUES / (event.steps * event.sampling_rate))
    return max(_FEWEST_CANARIES, min(most, int(affordable)))


def one_run_canaries(mechanism: AuditedMechanism, *, canaries: int, coins: np.random.Generator) -> Check:
    """A4: the lower bound on ε stays below what is claimed, for all steps and for one step with everybody.

    A single step in which every unit takes part has the same noise and clip and a smaller
    claim, so that the bound comes closer to it.

    Args:
        canaries: m, at most; fewer where that many steps would take too long.
        coins: decides who is included; independent of the code under test.
    """
    everybody = replace(mechanism, event=PrivateSteps(mechanism.event.noise_multiplier, 1.0, 1))
    figures, sizes, limits = [], [], []
    for name, each in (("all steps", mechanism), ("one step, everybody in it", everybody)):
        claimed = epsilon([each.event], delta=each.delta)
        included_M = coins.random(affordable_canaries(each.event, most=canaries)) < 0.5
        bound = lower_bound_of(canary_scores(each, included_M), included_M, delta=each.delta)
        figures.append(Figure(f"lower bound on ε, {name} (claimed: at most {claimed:.2f})", bound, None, claimed))
        sizes.append(len(included_M))
        limits.append(ceiling(len(included_M), delta=each.delta))
    return Check(
        code="A4",
        title="Does an attacker who sees everything learn more than ε allows?",
        tested=f"{sizes[0]} and {sizes[1]} made-up units, each included by a coin, went through the code that "
        "samples, clips, sums and adds noise. An attacker who knows them all guessed from what was released "
        f"who was included (Steinke, Nasr & Jagielski 2023, at {CONFIDENCE:.0%} confidence).",
        meaning="The attacker's success does not contradict the ε in the ledger.",
        not_proven="That ε is right: the bound is far below the claim by its nature. If every guess had been right, "
        f"it would have been {limits[0]:.2f} and {limits[1]:.2f}; a claim above that cannot be refuted here. At the "
        "default settings a noise of half the size passes, and is caught by A1; a noise of an eighth or a clip four "
        "times too wide is caught here too.",
        figures=tuple(figures),
    )
