"""Choosing a token from logits, and the log-probability of what was chosen.

The log-probability is that of the distribution the token was really drawn from
(bias, constraint, temperature, top-k and top-p applied): it is the behaviour
log-prob that off-policy training divides by, so it is recorded here and never
recomputed. A greedy token carries its log-probability at temperature 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

_COLDEST = 1e-30
"""Below this no two float32 logits that differ are both likely; it keeps the division finite."""


_BLOCK = 256

_LARGEST_PUSH_NATS = math.log(2) + 1e-6
"""By how much a token's log-probability may have been raised for it to be the model's own."""


class NothingAllowed(ValueError):
    """The constraint leaves no token to draw."""


@dataclass(frozen=True)
class SamplingParameters:
    """How to draw.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1 keeps the whole distribution.
        top_k: keeps the k likeliest tokens, those of lower id where tied; 0 keeps all.
        logit_bias: token id and what is added to its logit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Token:
    """A drawn token, its log-probability, and the likeliest tokens of the same distribution.

    `free` says that the model might as well have drawn it by itself: what was asked for besides the prompt (bias,
    constraint, top-k, top-p) has at most doubled its probability, and did not leave it alone.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    free: bool = True


def sample(
    logits_V: np.ndarray,
    parameters: SamplingParameters,
    uniform: float,
    *,
    allowed_V: np.ndarray | None = None,
    top: int = 0,
) -> Token:
    """Draw one token by inverting the cumulative distribution.

    Args:
        logits_V: finite float32 logits.
        uniform: a draw from [0, 1); unused where greedy.
        allowed_V: bool, the tokens a constraint permits.
        top: how many of the likeliest tokens to report; fewer where fewer have a positive probability.
    Raises:
        NothingAllowed: no token is permitted.
    """
    own_V = logits_V
    if parameters.logit_bias:
        logits_V = logits_V.copy()
        ids, bias = zip(*parameters.logit_bias, strict=True)
        np.add.at(logits_V, np.array(ids), np.array(bias, np.float32))
    if allowed_V is not None:
        if not allowed_V.any():
            raise NothingAllowed("the constraint permits no token")
        logits_V = np.where(allowed_V, logits_V, -np.inf)
    greedy = parameters.temperature == 0
    likeliest = int(logits_V.argmax())
    relative_V = logits_V - logits_V[likeliest]
    if not greedy and parameters.temperature != 1:
        with np.errstate(over="ignore"):
            relative_V /= np.float32(max(parameters.temperature, _COLDEST))
    weights_V = np.exp(relative_V)
    own_log_total = math.log(weights_V.sum(dtype=np.float64))
    if not greedy:
        _keep_likeliest(weights_V, parameters)
    block_sums = np.add.reduceat(weights_V, np.arange(0, len(weights_V), _BLOCK), dtype=np.float64)
    total = float(block_sums.sum())
    drawn = likeliest if greedy else _invert(weights_V, block_sums, uniform * total)
    log_total = math.log(total)
    logprob = float(relative_V[drawn]) - log_total
    if own_V is logits_V:
        own_logprob = float(relative_V[drawn]) - own_log_total
    else:
        own_logprob = _logprob(own_V, drawn, 1.0 if greedy else max(parameters.temperature, _COLDEST))
    alone = allowed_V is not None and np.count_nonzero(allowed_V) == 1
    free = not alone and logprob - own_logprob <= _LARGEST_PUSH_NATS
    return Token(drawn, logprob, _top(relative_V, weights_V, log_total, top), free)


def _logprob(logits_V: np.ndarray, token_id: int, temperature: float) -> float:
    """Of a token in the model's own distribution."""
    with np.errstate(over="ignore"):
        relative_V = (logits_V - logits_V.max()) / np.float32(temperature)
    return float(relative_V[token_id]) - math.log(np.exp(relative_V).sum(dtype=np.float64))


def _invert(weights_V: np.ndarray, block_sums: np.ndarray, target: float) -> int:
    """The token in whose share of the running sum `target` lies: first its block, then its place in the block.

    A cumulative sum over a large vocabulary in one piece costs more than everything else here.
    """
    block, rest = _place(block_sums, target)
    first = block * _BLOCK
    within, _ = _place(weights_V[first : first + _BLOCK], rest)
    return first + within


def _place(weights: np.ndarray, target: float) -> tuple[int, float]:
    """Index of the weight in whose share of the running sum `target` lies, and how far into it.

    Python's own search: the one of `np.searchsorted` lets other threads run, and may wait long to go on.
    """
    cumulative = np.add.accumulate(weights, dtype=np.float64)
    index = bisect_right(cumulative, target)
    if index == len(cumulative):  # where rounding leads past the end: the last of positive weight
        index = bisect_left(cumulative, cumulative[-1])
    return index, target - float(cumulative[index - 1] if index else 0.0)


def _keep_likeliest(weights_V: np.ndarray, parameters: SamplingParameters) -> None:
    """Set the weights that top-k, then top-p, leave out to zero."""
    k = parameters.top_k
    if 0 < k < len(weights_V):
        smallest = np.partition(weights_V, -k)[-k]
        spare = k - int((weights_V > smallest).sum())
        weights_V[np.flatnonzero(weights_V == smallest)[spare:]] = 0.0
        weights_V[weights_V < smallest] = 0.0
    if parameters.top_p < 1:
        weights_V[~_nucleus(weights_V, parameters.top_p)] = 0.0


def _nucleus(weights_V: np.ndarray, top_p: float) -> np.ndarray:
    """Mask of the smallest set of likeliest tokens whose mass reaches `top_p` (Holtzman et al. 2020).

    Only tokens above the mean of what is left out can be in it, so only those are sorted.
    """
    total = weights_V.sum(dtype=np.float64)
    candidates = np.flatnonzero(weights_V >= (1 - top_p) * total / len(weights_V))
    weights = weights_V[candidates].astype(np.float64)
    order = np.argsort(-weights, kind="stable")
    mass_before = np.cumsum(weights[order]) - weights[order]
    keep = np.zeros(len(weights_V), bool)
    keep[candidates[order[mass_before < top_p * total]]] = True
    keep[candidates[order[0]]] = True  # the likeliest, however small top_p is
    return keep


def _top(relative_V: np.ndarray, weights_V: np.ndarray, log_total: float, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    count = min(count, len(weights_V))
    likeliest = np.argpartition(-weights_V, count - 1)[:count]
    ordered = sorted((i for i in likeliest.tolist() if weights_V[i] > 0), key=lambda i: (-weights_V[i], i))
    return tuple((i, float(relative_V[i]) - log_total) for i in ordered)
