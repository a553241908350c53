"""The mechanism itself: sensitivity, noise level, secrecy of the noise, empty batches."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.optimizers import DPOptimizer
from scipy import stats

from common.errors import PrivacyError
from edge_node.training.noise import SecureRandom, lattice_spacing
from edge_node.training.private_step import RESERVE, ClippedSum

D = 2_000


def clipped_sum(gradients: torch.Tensor, *, clip: float = 0.5, sigma: float = 1.0) -> torch.Tensor:
    total = ClippedSum(gradients.shape[1], clip_norm=clip, noise_multiplier=sigma)
    total.add(gradients)
    return total.unsafe_release_without_noise()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1e-12, 1e-3, 1.0, 1e6, 1e30]),
    st.integers(1, 6),
    st.sampled_from([0.01, 0.5, 3.0]),
)
def test_one_unit_more_changes_the_sum_by_at_most_c(seed: int, scale: float, units: int, clip: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(units, D, generator=generator) * scale
    gradients[:, : D // 2] *= (torch.rand(D // 2, generator=generator) < 0.01) * 1.0
    with_all, without_last = (clipped_sum(g, clip=clip) for g in (gradients, gradients[:-1]))
    assert torch.linalg.vector_norm(with_all - without_last).item() <= clip


def test_small_units_pass_unclipped_and_large_ones_keep_their_direction() -> None:
    small = torch.randn(1, D) * 1e-4
    torch.testing.assert_close(clipped_sum(small)[None].float(), small, atol=1e-8, rtol=1e-4)
    large = torch.randn(1, D) * 100
    released = clipped_sum(large)
    assert abs(torch.linalg.vector_norm(released).item() - 0.5 * (1 - RESERVE)) < 1e-5
    assert torch.cosine_similarity(released, large[0].double(), dim=0) > 1 - 1e-9


def test_equal_to_opacus_clipping_without_noise() -> None:
    weight = torch.nn.Parameter(torch.zeros(D))
    optimizer = DPOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.5 * (1 - RESERVE),
        expected_batch_size=4,
    )
    weight.grad_sample = torch.randn(4, D) * torch.tensor([[0.001], [0.01], [1.0], [50.0]])
    expected_sum = clipped_sum(weight.grad_sample)
    optimizer.step()
    torch.testing.assert_close(-weight.detach() * 4, expected_sum.float(), atol=2e-6, rtol=2e-5)


def test_the_noise_has_the_accounted_level_also_on_an_empty_batch() -> None:
    dimension, clip, sigma = 200_000, 0.1, 1.3
    total = ClippedSum(dimension, clip_norm=clip, noise_multiplier=sigma)
    released = total.release(SecureRandom()).numpy()
    assert abs(released.std() / (sigma * clip) - 1) < 0.01
    assert stats.kstest(released / (sigma * clip), "norm").pvalue > 1e-4
    spacing = lattice_spacing(clip, sigma)
    np.testing.assert_array_equal(np.rint(released / spacing) * spacing, released)  # on the lattice


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_counts_as_zero_and_tells_nobody(value: float) -> None:
    """An error that depends on one record would be a release outside the mechanism."""
    good, bad = torch.randn(1, D), torch.randn(1, D)
    bad[0, 3] = value
    assert torch.equal(clipped_sum(torch.cat([bad, good, bad])), clipped_sum(good))
    assert not clipped_sum(bad).any()


def test_release_without_noise_is_refused() -> None:
    with pytest.raises(PrivacyError, match="without noise"):
        ClippedSum(D, clip_norm=1.0, noise_multiplier=0.0).release(SecureRandom())


_DRAW = """
import random, numpy, torch
random.seed(0); numpy.random.seed(0); torch.manual_seed(0)
from edge_node.training.noise import SecureRandom
r = SecureRandom()
print(r.normal(4).tolist(), r.bernoulli(0.5, 32).tolist())
"""


def test_no_seed_reproduces_noise_or_sampling() -> None:
    runs = {
        subprocess.run([sys.executable, "-c", _DRAW], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 2


def test_poisson_sampling_has_its_rate_and_no_fixed_size() -> None:
    random = SecureRandom()
    sizes = [int(random.bernoulli(0.3, 1000).sum()) for _ in range(300)]
    assert abs(np.mean(sizes) - 300) < 4
    assert abs(np.std(sizes) - np.sqrt(1000 * 0.3 * 0.7)) < 2.5
    assert random.bernoulli(1.0, 50).all()
    assert len(random.bernoulli(0.5, 0)) == 0
