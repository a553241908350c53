"""Robust aggregation rules: pure functions from `updates_ND` to one `delta_D`.

A rule either selects updates, whose weighted mean is the result, or makes a
result of its own. `RULES` has both kinds by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aggregator.rules.centred_clipping import centred_clipping
from aggregator.rules.distances import gram
from aggregator.rules.dnc import divide_and_conquer
from aggregator.rules.geometric_median import geometric_median
from aggregator.rules.krum import krum, multi_krum
from aggregator.rules.mean import capped_shares, mixture
from aggregator.rules.median import coordinate_median
from aggregator.rules.nnm import mixed_trimmed_mean
from aggregator.rules.norm_gate import TIMES_MEDIAN, norm_gate
from aggregator.rules.trimmed_mean import trimmed_mean
from common.errors import RoundError
from common.outliers import copies

Selecting = Callable[[np.ndarray, int, bool], np.ndarray]
"""(updates_ND, budget, alert) to the indices of the rows that are kept."""


@dataclass(frozen=True, eq=False)
class Decision:
    """A rule's result, and the rows it is made of."""

    delta_D: np.ndarray
    kept: tuple[int, ...]


Estimating = Callable[[np.ndarray, int, int], Decision]
"""(updates_ND, tolerated, budget) to a result and the rows it is made of."""


@dataclass(frozen=True, eq=False)
class Rule:
    """How accepted updates become one; exactly one of `selecting` and `estimating` is given.

    Attributes:
        minimum_sites: smallest federation the rule is for.
        minimum_updates: fewest accepted updates it can work with, by the liars it must tolerate.
        tells: whether being left out says something about a site; Krum leaves out as many as could lie every time.
    """

    minimum_sites: int
    minimum_updates: Callable[[int], int]
    selecting: Selecting | None = None
    estimating: Estimating | None = None
    tells: bool = False

    def decide(
        self,
        updates_ND: np.ndarray,
        weights_N: np.ndarray,
        tolerated: int,
        *,
        alert: bool = False,
        budget: int | None = None,
    ) -> Decision:
        """Combine updates.

        Args:
            updates_ND: float32, finite, each row within its L2 bound; not changed.
            weights_N: contract weights. Rules that make a result of their own ignore them: a rule that gave a
                site's value more weight would tolerate fewer sites.
            tolerated: liars among the updates.
            alert: leave out as many as are tolerated, whatever they look like; see `vigilance`.
            budget: most updates that a rule that `tells` leaves out; as many as are tolerated by default.
        Raises:
            RoundError: too few updates, or a result that is not finite.
        """
        needed = self.minimum_updates(tolerated)
        if len(updates_ND) < needed:
            raise RoundError(f"the rule needs at least {needed} updates to tolerate {tolerated}, got {len(updates_ND)}")
        most = tolerated if budget is None or not self.tells else budget
        if self.selecting is not None:
            kept = self.selecting(updates_ND, most, alert)
            if not len(kept):
                raise RoundError("the rule left out every update")
            shares_N = np.zeros(len(updates_ND))
            shares_N[kept] = capped_shares(np.asarray(weights_N)[kept])
            decision = Decision(mixture(updates_ND, shares_N), tuple(map(int, kept)))
        else:
            assert self.estimating is not None
            decision = self.estimating(updates_ND, tolerated, min(most, len(updates_ND) - needed))
        if not np.isfinite(decision.delta_D).all():
            raise RoundError("the combined update is not finite; no update that is may have been checked")
        return decision

    def combine(self, updates_ND: np.ndarray, weights_N: np.ndarray, tolerated: int) -> np.ndarray:
        """`decide` in the normal state, without the rows."""
        return self.decide(updates_ND, weights_N, tolerated).delta_D


def _all(updates_ND: np.ndarray, tolerated: int, alert: bool) -> np.ndarray:
    return np.arange(len(updates_ND))


def _short(updates_ND: np.ndarray, tolerated: int, alert: bool) -> np.ndarray:
    norms_N = np.sqrt([np.dot(row_D, row_D) for row_D in updates_ND])
    middle = np.sort(norms_N)[(len(norms_N) - 1) // 2]
    return np.flatnonzero(norm_gate(norms_N, largest=TIMES_MEDIAN * middle))


def _without_outliers(updates_ND: np.ndarray, gram_NN: np.ndarray, most: int, alert: bool) -> np.ndarray:
    """Neither near-duplicates, closest first, nor what stands apart; norms were bounded as updates were opened."""
    repeated = copies(gram_NN)[:most]
    single = np.setdiff1d(np.arange(len(updates_ND)), repeated)
    return divide_and_conquer(updates_ND, gram_NN, liars=most - len(repeated), alert=alert, among=single)


def _single_and_near(updates_ND: np.ndarray, budget: int, alert: bool) -> np.ndarray:
    return _without_outliers(updates_ND, gram(updates_ND), min(budget, len(updates_ND) - 1), alert)


def _mixed_and_trimmed(updates_ND: np.ndarray, tolerated: int, budget: int) -> Decision:
    """Without a few that agree: they are each other's neighbours, and mixing would keep them."""
    gram_NN = gram(updates_ND)
    kept = _without_outliers(updates_ND, gram_NN, budget, False)
    delta_D = mixed_trimmed_mean(updates_ND, liars=tolerated, gram_NN=gram_NN, rows=kept)
    return Decision(delta_D, tuple(map(int, kept)))


def _of_all(estimate: Callable[[np.ndarray, int], np.ndarray]) -> Estimating:
    return lambda updates_ND, tolerated, _: Decision(estimate(updates_ND, tolerated), tuple(range(len(updates_ND))))


def _majority(tolerated: int) -> int:
    return 2 * tolerated + 1


def _krum_minimum(tolerated: int) -> int:
    return 2 * tolerated + 3


RULES = {
    "mean": Rule(3, lambda _: 2, selecting=_all),
    "norm-gate": Rule(4, _majority, selecting=_short, tells=True),
    "median": Rule(4, _majority, estimating=_of_all(lambda updates_ND, _: coordinate_median(updates_ND))),
    "trimmed-mean": Rule(4, _majority, estimating=_of_all(lambda updates_ND, f: trimmed_mean(updates_ND, trim=f))),
    "geometric-median": Rule(4, _majority, estimating=_of_all(lambda updates_ND, _: geometric_median(updates_ND))),
    "centred-clipping": Rule(4, _majority, estimating=_of_all(lambda updates_ND, _: centred_clipping(updates_ND))),
    "krum": Rule(6, _krum_minimum, selecting=lambda updates_ND, f, _: krum(updates_ND, liars=f)),
    "multi-krum": Rule(6, _krum_minimum, selecting=lambda updates_ND, f, _: multi_krum(updates_ND, liars=f)),
    "dnc": Rule(4, _majority, selecting=_single_and_near, tells=True),
    "nnm-trimmed-mean": Rule(6, _majority, estimating=_mixed_and_trimmed, tells=True),
}
"""Rule by its name on the command line."""


def default_rule(sites: int) -> str:
    """The mean for small federations, NNM + trimmed mean from six sites on."""
    return "nnm-trimmed-mean" if sites >= RULES["nnm-trimmed-mean"].minimum_sites else "mean"


def tolerated_liars(sites: int) -> int:
    """f = max(1, ⌊(n − 1) / 4⌋) false updates among those of `sites`."""
    return max(1, (sites - 1) // 4)
