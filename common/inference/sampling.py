"""Choosing tokens from logits, and the log-probability of what was chosen.

The log-probability is that of the distribution the token was really drawn from
(temperature and top-p applied): it is the behaviour log-prob that off-policy
training divides by, so it is recorded here and never recomputed. A greedy token
carries its log-probability at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingParameters:
    """Temperature 0 is greedy; top_p 1 keeps the whole distribution."""

    temperature: float = 1.0
    top_p: float = 1.0


def sample(
    logits_NV: np.ndarray, parameters: list[SamplingParameters], uniforms_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits_NV: finite float32 logits.
        parameters: one per row.
        uniforms_N: one draw from [0, 1) a row; unused where greedy.
    Returns:
        tokens_N (int64) and logprobs_N (float64).
    """
    temperature_N = np.array([p.temperature for p in parameters])
    greedy_N = temperature_N == 0
    scaled_NV = logits_NV.astype(np.float64) / np.where(greedy_N, 1.0, temperature_N)[:, None]
    scaled_NV -= scaled_NV.max(axis=1, keepdims=True)
    probabilities_NV = np.exp(scaled_NV)
    for row, p in enumerate(parameters):
        if p.top_p < 1 and not greedy_N[row]:
            probabilities_NV[row, ~_nucleus(probabilities_NV[row], p.top_p)] = 0.0
    cumulative_NV = np.cumsum(probabilities_NV, axis=1)
    total_N = cumulative_NV[:, -1]
    drawn_N = (cumulative_NV <= (uniforms_N * total_N)[:, None]).sum(axis=1)
    tokens_N = np.where(greedy_N, logits_NV.argmax(axis=1), drawn_N)
    rows = np.arange(len(tokens_N))
    return tokens_N, scaled_NV[rows, tokens_N] - np.log(total_N)


def _nucleus(probabilities_V: np.ndarray, top_p: float) -> np.ndarray:
    """Mask of the smallest set of likeliest tokens whose mass reaches `top_p` (Holtzman et al. 2020)."""
    order = np.argsort(-probabilities_V, kind="stable")
    mass_before = np.cumsum(probabilities_V[order]) - probabilities_V[order]
    keep = np.zeros(len(probabilities_V), bool)
    keep[order[mass_before < top_p * probabilities_V.sum()]] = True
    return keep
