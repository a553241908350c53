from __future__ import annotations

import json
import math

import pytest

from edge_node.auditing.statement import Check, Figure, Statement


def check(*figures: Figure) -> Check:
    return Check("A0", "title", "tested", "meaning", "not proven", figures)


@pytest.mark.parametrize(
    ("figure", "passed"),
    [
        (Figure("in", 1.0, 1.0, 1.0), True),
        (Figure("low", 0.99, 1.0, None), False),
        (Figure("high", 1.01, None, 1.0), False),
        (Figure("open", 5.0), True),
        (Figure("not a number", math.nan), False),
        (Figure("infinite", math.inf, 0.0, None), False),
    ],
)
def test_a_figure_holds_inside_its_closed_interval(figure: Figure, passed: bool) -> None:
    assert figure.passed is passed
    assert check(Figure("good", 0.0), figure).passed is passed
    data = Statement("privacy", {}, (check(Figure("good", 0.0)), check(figure))).data()
    assert data["passed"] is passed
    json.dumps(data, allow_nan=False)


def test_nothing_measured_is_not_a_pass() -> None:
    assert not check().passed
    assert not Statement("privacy", {}, ()).passed
