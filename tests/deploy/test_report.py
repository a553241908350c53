from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from deploy import plots
from deploy.report import paired_gain


def test_the_bounds_are_scipys_for_large_samples() -> None:
    rng = np.random.default_rng(0)
    before = rng.random(2000)
    after = np.clip(before + rng.normal(0.05, 0.3, 2000), 0, 1)
    gain = paired_gain(before.tolist(), after.tolist())
    differences = after - before
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.90)
    assert abs(gain.low95 - expected.low) < 1e-4
    assert abs(gain.high95 - expected.high) < 1e-4
    assert abs(gain.after - gain.before - np.mean(differences)) < 1e-12


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=50))
def test_the_bounds_enclose_the_mean(pairs: list[tuple[float, float]]) -> None:
    before, after = zip(*pairs, strict=True)
    gain = paired_gain(before, after)
    assert gain.low95 <= np.mean(after) - np.mean(before) + 1e-9
    assert gain.high95 >= np.mean(after) - np.mean(before) - 1e-9


def test_a_loss_is_not_called_a_gain() -> None:
    gain = paired_gain([0.6] * 50, [0.4, 0.5] * 25)
    assert gain.high95 < 0


def test_rounds_without_an_exam_are_no_hindrance_to_the_plots() -> None:
    exams = [
        {
            "round": number,
            "rewards": {"a": 0.4, "b": 0.5 + number / 100},
            "epsilons": {"a": number * 1.0, "b": number * 1.5},
            "honest_accuracy": 0.4,
            "backdoor_success": 0.1,
        }
        for number in (0, 3, 6)
    ]
    report = {
        "sites": [{"name": "a", "attack": None}, {"name": "b", "attack": "scale"}],
        "exams": exams,
        "privacy": {"epsilon_budget": 8.0},
    }
    for plot in (plots.reward_by_round, plots.attack_by_round, plots.epsilon_by_site):
        assert str(plot(report)).startswith("<svg")
    both = str(plots.attack_by_round(report))
    without = {**report, "exams": [{**exam, "backdoor_success": None} for exam in exams]}
    accuracy = str(plots.attack_by_round(without))
    assert both.count("<use") > accuracy.count("<use") >= len(exams)  # a mark for each exam
