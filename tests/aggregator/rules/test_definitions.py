"""Each rule against its definition, written in the most literal way."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from aggregator.federation import check_rule
from aggregator.rules import default_rule
from aggregator.rules.nnm import nearest_neighbour_mixing
from aggregator.rules.trimmed_mean import trimmed_mean
from common.errors import ConfigError, RoundError

UPDATES = np.random.default_rng(0).normal(size=(7, 30)).astype(np.float32)


def test_trimmed_mean_is_scipys() -> None:
    np.testing.assert_allclose(
        trimmed_mean(UPDATES, trim=2), stats.trim_mean(UPDATES.astype(np.float64), 2 / 7, axis=0), atol=1e-6
    )
    with pytest.raises(RoundError, match="more than 6 updates, got 6"):
        trimmed_mean(UPDATES[:6], trim=3)


def test_mixing_is_the_mean_of_the_nearest_by_plain_distances() -> None:
    distances = np.linalg.norm(UPDATES[:, None].astype(np.float64) - UPDATES[None], axis=2)
    expected = [UPDATES[np.argsort(row)[:5]].astype(np.float64).mean(axis=0) for row in distances]
    np.testing.assert_allclose(nearest_neighbour_mixing(UPDATES, liars=2), expected, atol=1e-6)


def test_mixing_small_differences_of_large_vectors_keeps_each_row_its_own_nearest() -> None:
    """Distances by squares lose small differences; Flower's Krum picked an attacker that way."""
    base = np.random.default_rng(1).normal(size=200) * 1e4
    rows = (base + np.random.default_rng(2).normal(size=(6, 200)) * 1e-3).astype(np.float32)
    mixed = nearest_neighbour_mixing(rows, liars=5)  # one neighbour: itself
    np.testing.assert_allclose(mixed, rows, atol=1e-6)


def test_which_rule_a_federation_gets() -> None:
    assert [default_rule(n) for n in (3, 5, 6, 20)] == ["mean", "mean", "nnm-trimmed-mean", "nnm-trimmed-mean"]
    for name, sites in (("mean", 2), ("nnm-trimmed-mean", 5)):
        with pytest.raises(ConfigError, match=f"needs at least .* got {sites}"):
            check_rule(name, sites=sites)
    with pytest.raises(ConfigError, match="known rules: mean, nnm-trimmed-mean"):
        check_rule("average", sites=6)
