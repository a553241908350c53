from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from edge_node.collecting.selection import (
    UNDECIDED,
    Candidate,
    Decision,
    ExplicitMarking,
    OnFeedback,
    SamplingRate,
    strategy_of,
)
from edge_node.marking import Mark
from tests.edge_node.collecting.exchanges import exchange


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_zero_to_one_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="within"):
        SamplingRate(rate)


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_requests_are_selected_at_the_rate_with_a_reason(rate: float) -> None:
    candidate = Candidate(exchange(), Mark(("good",)), {0: 1.0})
    decisions = [SamplingRate(rate).decide(candidate) for _ in range(5000)]
    assert abs(sum(d.accepted for d in decisions) / 5000 - rate) < 0.03
    assert {d.reason for d in decisions} == {"sampling-rate"}
    assert all(d.labels == (("sampled",) if d.accepted else ("not-sampled",)) for d in decisions)


def test_marks_and_feedback_decide_where_they_are_asked_for() -> None:
    plain, marked = Candidate(exchange()), Candidate(exchange(), Mark(("good",)))
    rewarded = Candidate(exchange(), rewards={0: 0.0})
    by_mark = Decision(True, "explicit-marking")
    assert [ExplicitMarking().decide(c) for c in (plain, marked, rewarded)] == [UNDECIDED, by_mark, UNDECIDED]
    on_feedback = [OnFeedback().decide(c) for c in (plain, marked, rewarded)]
    assert on_feedback == [UNDECIDED, by_mark, Decision(True, "feedback")]


def test_built_in_strategies_have_names() -> None:
    assert isinstance(strategy_of("sampling-rate", rate=0.25), SamplingRate)
    assert isinstance(strategy_of("explicit-marking", rate=0.1), ExplicitMarking)
    assert isinstance(strategy_of("feedback", rate=0.1), OnFeedback)


STRATEGIES = """
from edge_node.collecting.selection import Decision

class Long:
    def decide(self, candidate):
        return Decision(len(candidate.exchange.answers[0].text) > 10, "length")

class Needs:
    def __init__(self, argument): ...
    def decide(self, candidate): ...

class Slow:
    async def decide(self, candidate): ...

class Nothing: ...

instance = Long()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "site_strategies.py").write_text(STRATEGIES)
    (tmp_path / "site_broken.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("site_strategies", None)


def test_a_sites_own_strategy_is_found_by_its_path(installed: None) -> None:
    strategy = strategy_of("site_strategies:Long", rate=0.1)
    assert strategy.decide(Candidate(exchange(text="a long answer"))) == Decision(True, "length")
    assert strategy.decide(Candidate(exchange(text="short"))) == Decision(False, "length")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sampling_rate", "none of sampling-rate"),
        ("", "none of"),
        ("site_strategies", "not a path"),
        ("site_strategies.Long", "not a path"),
        ("../evil:Long", "not a path"),
        ("site_strategies:Long()", "not a path"),
        ("site_strategies:Long\n", "not a path"),
        ("no_such_package:Long", "cannot be imported: ModuleNotFoundError"),
        ("site_broken:Long", "cannot be imported: RuntimeError: no licence"),
        ("site_strategies:Missing", "no class Missing"),
        ("site_strategies:Nothing", "method decide"),
        ("site_strategies:instance", "no class instance"),
        ("os:system", "no class system"),
        ("site_strategies:Needs", "Needs\\(\\) failed: TypeError"),
        ("site_strategies:Slow", "not a coroutine"),
    ],
)
def test_what_is_no_strategy_is_refused_at_start_and_says_why(installed: None, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        strategy_of(name, rate=0.1)


@given(st.floats())
def test_every_rate_is_a_probability_or_refused(rate: float) -> None:
    if 0 <= rate <= 1:
        assert SamplingRate(rate).rate == rate
    else:
        with pytest.raises(ValueError, match="within"):
            SamplingRate(rate)
