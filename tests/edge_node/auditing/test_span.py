"""The span test alone, on gradients made by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_node.auditing.span import Released, distances, recover, row_space, threshold

VOCABULARY, HIDDEN = 200, 64


def gradient(seed: int, present: list[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random embeddings, and a gradient Σ aₜ xₜᵀ of the present tokens."""
    rng = np.random.default_rng(seed)
    embeddings = rng.normal(size=(VOCABULARY, HIDDEN))
    return rng.normal(size=(rows, len(present))) @ embeddings[present], embeddings


tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20, unique=True)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), tokens)
def test_tokens_up_to_the_rank_are_recovered_exactly(seed: int, present: list[int]) -> None:
    block, embeddings = gradient(seed, present, rows=24)
    assert len(row_space(block.astype(np.float32), 0.0)) == len(present)
    found = distances(Released((block,), (embeddings,)))
    recovery = recover(found, present, threshold(found, frozenset(present)))
    assert recovery.recovered == recovery.ranked == frozenset(present)
    assert recovery.false_positives == 0


def test_more_tokens_than_the_rank_are_not_separated() -> None:
    present = list(range(40))
    block, embeddings = gradient(0, present, rows=24)
    found = distances(Released((block,), (embeddings,)))
    assert found.min() > 0.1
    assert len(recover(found, present, threshold(found, frozenset(present))).recovered) < 40


def test_a_space_that_holds_everything_tells_nothing() -> None:
    rng = np.random.default_rng(0)
    found = distances(Released((rng.normal(size=(32, 8)),), (rng.normal(size=(VOCABULARY, 8)),)))
    recovery = recover(found, [1, 2, 3], threshold(found, frozenset([1, 2, 3])))
    assert recovery.ranked == frozenset()
    assert recovery.false_positives == VOCABULARY - 3


def test_blocks_with_their_own_inputs_must_agree() -> None:
    """A token inside one block's space and outside the other's is not named."""
    rng = np.random.default_rng(0)
    both, other = (rng.normal(size=(VOCABULARY, HIDDEN)) for _ in range(2))
    first = rng.normal(size=(8, 3)) @ both[[1, 2, 9]]
    second = rng.normal(size=(8, 2)) @ other[[1, 2]]
    found = distances(Released((first, second), (both, other)))
    assert recover(found, [1, 2], threshold(found, frozenset([1, 2]))).recovered == {1, 2}
    assert found[9] > 0.3


def test_known_noise_is_cut_off_and_strong_noise_hides_all() -> None:
    present = [3, 50, 120, 7, 90, 33]
    block, embeddings = gradient(4, present, rows=24)
    rng = np.random.default_rng(5)

    def hits(noise: float) -> float:
        noisy = [block + noise * rng.normal(size=block.shape) for _ in range(30)]
        found = [distances(Released((each,), (embeddings,), noise)) for each in noisy]
        return float(np.mean([len(recover(each, present, 0.5).ranked) for each in found]))

    assert hits(0.01) == 6
    assert len(row_space(block + rng.normal(size=block.shape), 1.0)) == 6
    assert len(row_space(rng.normal(size=block.shape), 1.0)) <= 2
    assert 2 < hits(3.0) < 6
    assert hits(1000.0) < 1


def test_a_claim_of_noise_that_is_not_there_does_not_fool_the_attacker() -> None:
    present = [3, 50, 120, 7, 90, 33]
    block, embeddings = gradient(4, present, rows=24)
    noisy = block + 0.01 * np.random.default_rng(6).normal(size=block.shape)
    found = distances(Released((noisy,), (embeddings,), noise_scale=20.0))
    assert recover(found, present, 0.5).ranked == frozenset(present)
