import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.inference.sampling import SamplingParameters, sample


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def test_draws_follow_the_distribution_at_the_temperature() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, -30.0], np.float32)
    count = 20_000
    uniforms = np.random.default_rng(0).random(count)
    tokens, logprobs = sample(np.tile(logits, (count, 1)), [SamplingParameters(0.7)] * count, uniforms)
    expected = softmax(logits.astype(np.float64) / 0.7)
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / count, expected, atol=0.012)
    np.testing.assert_allclose(logprobs, np.log(expected)[tokens], atol=1e-6)


def test_greedy_rows_take_the_largest_and_sampled_rows_do_not_disturb_them() -> None:
    logits = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32)
    parameters = [SamplingParameters(0.0), SamplingParameters(1.0), SamplingParameters(0.0)]
    tokens, logprobs = sample(logits, parameters, np.array([0.99, 0.5, 0.01]))
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()
    assert abs(logprobs[0] - np.log(softmax(logits[0].astype(np.float64))[tokens[0]])) < 1e-6


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.999), st.floats(0, 0.999999))
def test_top_p_draws_from_the_smallest_nucleus_and_renormalises(seed: int, top_p: float, uniform: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(1, 12)).astype(np.float32) * 3
    tokens, logprobs = sample(logits, [SamplingParameters(1.0, top_p)], np.array([uniform]))
    p = softmax(logits[0].astype(np.float64))
    order = np.argsort(-p)
    size = int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-9)) + 1
    nucleus = order[:size]
    assert tokens[0] in nucleus
    assert abs(logprobs[0] - np.log(p[tokens[0]] / p[nucleus].sum())) < 1e-6


@given(st.floats(0, 1, exclude_max=True))
def test_every_uniform_gives_a_token_of_positive_probability(uniform: float) -> None:
    logits = np.array([[-1e4, 0.0, -1e4, 1.0, -1e4]], np.float32)
    tokens, logprobs = sample(logits, [SamplingParameters()], np.array([uniform]))
    assert tokens[0] in (1, 3)
    assert np.isfinite(logprobs[0])
