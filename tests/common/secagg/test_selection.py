"""The gates on sketches: one budget, hard before soft, and what they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import RoundError
from common.secagg.selection import Selection, norm_limit, select


def honest(count: int, *, seed: int = 0, rows: int = 512) -> dict[str, np.ndarray]:
    """A common direction and independent noise, norms near 0.8."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=rows)
    points = common * 0.4 / np.linalg.norm(common) + rng.normal(size=(count, rows)) * 0.7 / np.sqrt(rows)
    return {f"s{i:02}": point for i, point in enumerate(points)}


def choose(points: dict[str, np.ndarray], **changed: Any) -> Selection:
    options: dict[str, Any] = {"disputes": (), "budget": 2, "minimum": 7, "seed": bytes(32)} | changed
    return select(points, clip_norm=1.0, **options)


def test_the_norm_gate_is_hard_and_leaves_room_for_the_sketchs_own_error() -> None:
    assert norm_limit(1.0, 512) == pytest.approx(1.15)
    assert norm_limit(2.0, 128) == pytest.approx(2.6)
    points = honest(10)
    points["s03"] *= 1.2 / np.linalg.norm(points["s03"])
    points["s04"] *= 1.14 / np.linalg.norm(points["s04"])
    points["s05"][0] = np.nan
    chosen = choose(points, filters=False)
    assert set(chosen.excluded) == {"s03", "s05"}
    points["s06"] *= 9
    with pytest.raises(RoundError, match="3 uploads must be excluded, at most 2"):
        choose(points)


def test_clones_are_excluded_closest_first_within_the_budget() -> None:
    points = honest(10)
    points["s07"] = points["s02"] + 1e-6
    chosen = choose(points)
    assert set(chosen.excluded) == {"s02", "s07"}
    assert "repeats" in chosen.excluded["s07"].reason
    assert len(choose(points, budget=1).excluded) == 1
    assert not choose(points, budget=0).excluded


def test_a_direction_of_a_few_is_excluded() -> None:
    points = honest(12)
    away = np.random.default_rng(9).normal(size=512)
    for name in ("s02", "s08"):
        points[name] = points[name] * 0.3 + away * 0.95 / np.linalg.norm(away)
    assert set(choose(points, budget=2, minimum=8).excluded) == {"s02", "s08"}


def test_the_filters_leave_a_sum_and_can_be_left_out() -> None:
    points = honest(8)
    points["s03"] = -points["s03"]
    assert set(choose(points).excluded) == {"s03"}
    assert not choose(points, minimum=8).excluded
    assert not choose(points, filters=False).excluded


def test_what_norms_and_disputes_take_is_not_left_for_the_filters() -> None:
    points = honest(10)
    points["s01"] *= 9
    points["s07"] = points["s02"] + 1e-6
    chosen = choose(points, disputes=[("s03", "s04")], budget=2)
    assert len(chosen.excluded) == 2 and "s01" in chosen.excluded
    assert set(chosen.excluded) - {"s01"} <= {"s03", "s04"}


def test_who_has_most_disputes_goes_first_and_settled_ones_cost_nothing() -> None:
    points = honest(10)
    disputes = [("s01", "s05"), ("s02", "s05"), ("s05", "s09")]
    assert set(choose(points, disputes=disputes, filters=False).excluded) == {"s05"}
    points["s05"] *= 9
    assert set(choose(points, disputes=disputes, filters=False).excluded) == {"s05"}


def test_the_order_of_sites_does_not_matter() -> None:
    points = honest(12, seed=4)
    points["s02"], points["s07"] = -points["s02"], points["s05"]
    turned = dict(reversed(points.items()))
    assert len(choose(points).excluded) == 2
    assert choose(points) == choose(turned)
