"""Drawing against a plain computation of the distribution in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.inference.sampling import NothingAllowed, SamplingParameters, sample


def distribution(logits: np.ndarray, parameters: SamplingParameters, allowed: np.ndarray | None = None) -> np.ndarray:
    """What `sample` should draw from, written down from the definitions."""
    x = logits.astype(np.float64)
    for token, bias in parameters.logit_bias:
        x[token] += bias
    if allowed is not None:
        x[~allowed] = -np.inf
    p = np.exp((x - x.max()) / (parameters.temperature or 1.0))
    p /= p.sum()
    if parameters.temperature == 0:
        return p
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if parameters.top_k:
        p[order[parameters.top_k :]] = 0.0
        p /= p.sum()
    if parameters.top_p < 1:
        size = int(np.searchsorted(np.cumsum(p[order]), parameters.top_p - 1e-9)) + 1
        p[order[size:]] = 0.0
        p /= p.sum()
    return p


def on_no_edge(p: np.ndarray, parameters: SamplingParameters, logits: np.ndarray, allowed: np.ndarray | None) -> bool:
    """Whether rounding cannot decide what is in the nucleus."""
    whole = replace(parameters, top_p=1.0)
    masses = np.cumsum(np.sort(distribution(logits, whole, allowed))[::-1])
    return parameters.top_p == 1 or bool(np.abs(masses - parameters.top_p).min() > 1e-5)


PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.one_of(st.sampled_from([1.0, 0.5, 0.95, 0.995, 0.999]), st.floats(0.01, 0.999)),
    top_k=st.integers(0, 15),
    logit_bias=st.lists(st.tuples(st.integers(0, 11), st.floats(-100, 100)), max_size=3).map(tuple),
)
UNIFORM = st.floats(0, 1, exclude_max=True)


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 10_000), PARAMETERS, UNIFORM, st.lists(st.booleans(), min_size=12, max_size=12))
def test_the_logprob_is_that_of_the_distribution_drawn_from(
    seed: int, parameters: SamplingParameters, uniform: float, allowed: list[bool]
) -> None:
    logits = np.random.default_rng(seed).normal(size=12).astype(np.float32) * 3
    before = logits.copy()
    mask = np.array(allowed) if any(allowed) else None
    token = sample(logits, parameters, uniform, allowed_V=mask, top=12)
    p = distribution(logits, parameters, mask)
    assert p[token.id] > 0
    assert token.logprob == pytest.approx(np.log(p[token.id]), abs=2e-5)  # a bias of 100 in float32
    if parameters.temperature == 0:
        assert p[token.id] == p.max()
    else:
        before_token = p[: token.id].sum()
        assert before_token - 1e-5 <= uniform <= before_token + p[token.id] + 1e-5
    reported = dict(token.top)
    assert set(reported) <= set(np.flatnonzero(p))
    if on_no_edge(p, parameters, logits, mask):
        assert set(reported) >= set(np.flatnonzero(p > 1e-30))
    assert [i for i, _ in token.top] == sorted(reported, key=lambda i: (-p[i], i)) or np.ptp(p[list(reported)]) < 1e-6
    np.testing.assert_array_equal(logits, before)


def test_draws_follow_the_distribution_over_a_large_vocabulary() -> None:
    logits = np.full(1000, -30.0, np.float32)
    logits[[3, 255, 256, 700, 999]] = [2.0, 1.0, 0.0, -1.0, 1.5]
    parameters = SamplingParameters(0.7)
    drawn = [sample(logits, parameters, u) for u in np.random.default_rng(0).random(20_000)]
    expected = distribution(logits, parameters)
    counts = np.bincount([token.id for token in drawn], minlength=1000)
    np.testing.assert_allclose(counts / len(drawn), expected, atol=0.012)
    np.testing.assert_allclose([t.logprob for t in drawn], np.log(expected)[[t.id for t in drawn]], atol=1e-6)


@pytest.mark.parametrize(("top_k", "kept"), [(1, {2}), (2, {1, 2}), (3, {1, 2, 3}), (9, {0, 1, 2, 3, 4})])
def test_top_k_keeps_exactly_k_even_where_tokens_are_tied(top_k: int, kept: set[int]) -> None:
    logits = np.array([0.0, 1.0, 2.0, 1.0, 0.0], np.float32)
    drawn = {sample(logits, SamplingParameters(top_k=top_k), u).id for u in np.linspace(0, 0.9999, 200)}
    assert drawn == kept


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-3, 1.0, 1e9])
def test_every_uniform_gives_a_token_of_positive_probability(uniform: float, temperature: float) -> None:
    logits = np.array([-np.inf, 0.0, -1e9, 1.0, -1e9] + [-np.inf] * 300, np.float32)
    token = sample(logits, SamplingParameters(temperature), uniform, allowed_V=np.isfinite(logits), top=3)
    assert np.isfinite(token.logprob)
    assert np.isfinite(logits[token.id])
    if temperature < 0.1:
        assert token.id == 3


def test_the_last_uniform_never_leads_past_the_end() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 5, 255, 257, 700):
        for _ in range(60):
            logits = rng.normal(size=size).astype(np.float32) * 4
            logits[rng.random(size) < 0.3] = -1e9
            logits[0] = 0.0
            for uniform in (1 - 2**-53, 1 - 2**-52):
                assert logits[sample(logits, SamplingParameters(), uniform).id] > -1e9


def test_top_logprobs_are_the_likeliest_of_the_same_distribution() -> None:
    logits = np.random.default_rng(1).normal(size=500).astype(np.float32)
    for parameters in (SamplingParameters(0.0), SamplingParameters(0.5), SamplingParameters(1.0, 0.5, 3)):
        p = distribution(logits, parameters)
        token = sample(logits, parameters, 0.4, top=5)
        expected = [i for i in np.argsort(-p)[:5] if p[i] > 0]
        assert [i for i, _ in token.top] == expected
        np.testing.assert_allclose([v for _, v in token.top], np.log(p[expected]), atol=1e-6)
        assert sample(logits, parameters, 0.4).top == ()


def test_a_constraint_that_permits_nothing_is_an_error_not_a_token() -> None:
    with pytest.raises(NothingAllowed):
        sample(np.zeros(4, np.float32), SamplingParameters(), 0.5, allowed_V=np.zeros(4, bool))


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0, 1.7]), st.sampled_from(["bias", "allowed", "top_k", "top_p"])
)
def test_a_token_is_free_where_its_probability_was_at_most_doubled(seed: int, temperature: float, steered: str) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, 12).astype(np.float32)
    allowed = rng.random(12) < 0.5 if steered == "allowed" else None
    if allowed is not None:
        allowed[0] = allowed[1] = True
    parameters = SamplingParameters(
        temperature,
        top_p=0.4 if steered == "top_p" else 1.0,
        top_k=2 if steered == "top_k" else 0,
        logit_bias=((3, 5.0), (4, -5.0)) if steered == "bias" else (),
    )
    token = sample(logits, parameters, float(rng.random()), allowed_V=allowed)
    scaled = logits.astype(np.float64) / temperature
    own = scaled[token.id] - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
    push = token.logprob - own
    if abs(push - np.log(2)) > 1e-4:
        assert token.free == (push < np.log(2))


def test_the_only_token_a_constraint_leaves_is_not_free() -> None:
    logits, only = np.array([9.0, 0.0, 0.0], np.float32), np.array([True, False, False])
    assert sample(logits, SamplingParameters(), 0.5).free
    assert not sample(logits, SamplingParameters(), 0.5, allowed_V=only).free
    assert sample(logits, SamplingParameters(temperature=0), 0.5).free
