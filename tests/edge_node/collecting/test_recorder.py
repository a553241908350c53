"""What is kept of an answered request, and what leaves no trace."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from common.chat import Message, ToolCall
from edge_node.collecting import tool_durations
from edge_node.collecting.pending import Pending
from edge_node.collecting.selection import (
    UNDECIDED,
    Candidate,
    Decision,
    ExplicitMarking,
    OnFeedback,
    SamplingRate,
    Undecided,
)
from edge_node.marking import Mark
from tests.edge_node.collecting.exchanges import NOW, POLICY, Site, exchange


def test_what_is_not_selected_leaves_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path, SamplingRate(0.0))
    before = site.files()
    with caplog.at_level(logging.DEBUG):
        for i in range(20):
            site.recorder.record(exchange(f"chatcmpl-{i}", "a secret answer", marking=Mark(("good",))))
    assert site.files() == before
    assert not caplog.records
    assert len(site.pending) == 0


def test_what_waits_leaves_no_trace_until_it_is_decided_about_and_none_when_it_never_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, ExplicitMarking(), pending=Pending(wait_s=60.0))
    before = site.files()
    with caplog.at_level(logging.DEBUG):
        site.recorder.record(exchange("chatcmpl-1", "a secret answer"))
        assert len(site.pending) == 1
        site.now_s += 61
        site.recorder.purge()
    assert len(site.pending) == 0
    assert site.files() == before
    assert not caplog.records


def test_the_decision_its_reason_and_the_mark_are_recorded(tmp_path: Path) -> None:
    site = Site(tmp_path, ExplicitMarking())
    marking = Mark(("good", "reviewed"), {"channel": "chat"}, task_id="from the mark")
    site.recorder.record(exchange(marking=marking, task_id="from the request", run_id="r", key_id="k1"))
    (record,) = site.records()
    assert record.selection.accepted and record.selection.reason == "explicit-marking"
    assert list(record.selection.labels) == ["good", "reviewed"]
    assert dict(record.selection.metadata) == {"channel": "chat"}
    assert (record.task_id, record.run_id, record.key_id) == ("from the mark", "r", "k1")
    assert record.collected_at_s == NOW


def test_a_sampled_requests_mark_is_kept_too(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange(marking=Mark(("good", "sampled"))))
    assert list(site.records()[0].selection.labels) == ["sampled", "good"]


def test_marks_and_a_strategys_reason_are_redacted_before_anything_is_written(tmp_path: Path) -> None:
    class Talkative:
        def decide(self, candidate: Candidate) -> Decision:
            return Decision(True, f"said {candidate.exchange.answers[0].text}", ("to jane@example.org",))

    site = Site(tmp_path, Talkative())
    site.recorder.record(exchange(text="my password: hunter2", marking=Mark((), {"token": "s3cret"})))
    (record,) = site.records()
    for secret in ("hunter2", "jane", "s3cret"):
        assert secret not in str(record)
    assert not record.completion_token_ids


@pytest.mark.parametrize("policy", [POLICY + "[collection]\nenabled = false\n", "not toml", None])
def test_without_a_policy_that_allows_it_nothing_is_kept_not_even_in_memory(tmp_path: Path, policy: str | None) -> None:
    site = Site(tmp_path, OnFeedback())
    site.recorder.record(exchange("chatcmpl-0"))
    assert len(site.pending) == 1
    if policy is None:
        site.policy.unlink()
    else:
        site.policy.write_text(policy)
    site.recorder.record(exchange("chatcmpl-1", marking=Mark()))
    site.recorder.purge()
    assert len(site.pending) == 0
    assert site.records() == []


@pytest.mark.parametrize("answer", [True, None, (True, "reason"), "accept"])
def test_a_strategy_that_answers_nonsense_selects_nothing(tmp_path: Path, answer: object) -> None:
    class Nonsense:
        def decide(self, candidate: Candidate) -> Decision | Undecided:
            return answer  # type: ignore[return-value]

    site = Site(tmp_path, Nonsense())
    site.recorder.record(exchange())
    assert site.records() == [] and len(site.pending) == 0


def test_a_strategy_that_fails_selects_nothing_and_its_text_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        def decide(self, candidate: Candidate) -> Decision:
            raise ValueError(candidate.exchange.answers[0].text)

    site = Site(tmp_path, Fails())
    with caplog.at_level(logging.DEBUG):
        site.recorder.record(exchange(text="a secret answer"))
    assert site.records() == []
    assert "ValueError" in caplog.text and "secret" not in caplog.text


def test_a_strategy_may_look_at_the_answer(tmp_path: Path) -> None:
    class Long:
        def decide(self, candidate: Candidate) -> Decision:
            return Decision(len(candidate.exchange.answers[0].text) > 10, "length")

    site = Site(tmp_path, Long())
    for i, text in enumerate(("short", "a long answer")):
        site.recorder.record(exchange(f"chatcmpl-{i}", text))
    assert [r.messages[-1].content for r in site.records()] == ["a long answer"]


def test_a_strategy_may_wait_for_a_second_opinion(tmp_path: Path) -> None:
    """Undecided again after feedback: what was said is kept for the next time it is asked."""

    class Both:
        def decide(self, candidate: Candidate) -> Decision | Undecided:
            if candidate.rewards and candidate.marking is not None:
                return Decision(True, "both")
            return UNDECIDED

    from edge_node.collecting.contract import About

    site = Site(tmp_path, Both())
    site.recorder.record(exchange())
    site.contract.reward(About(["chatcmpl-1"], "local"), 0.5)
    assert site.records() == []
    site.contract.mark(About(["chatcmpl-1"], "local"), Mark(("good",)))
    (record,) = site.records()
    assert record.selection.reason == "both"
    assert [(r.source, r.value) for r in record.rewards] == [("feedback", 0.5)]


def test_plain_completions_are_not_recorded(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    site.recorder.record(exchange(messages=[], prompt="once upon a time"))
    assert site.records() == []


def test_tool_calls_are_recorded_with_arguments_results_and_durations(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    calls = (ToolCall("c1", "search", '{"q": "x"}'), ToolCall("c2", "search", '{"password": "hunter2"}'))
    conversation = [
        Message("user", "find x"),
        Message("assistant", None, tool_calls=calls, reasoning="I should look"),
        Message("tool", "found x", tool_call_id="c1"),
    ]
    metadata = {tool_durations.METADATA_KEY: tool_durations.written({"c1": 1.5})}
    site.recorder.record(exchange(messages=conversation, metadata=metadata))
    (record,) = site.records()
    asked, result = record.messages[1], record.messages[2]
    assert asked.reasoning == "I should look"
    assert [(c.id, c.name, c.result, c.duration_s) for c in asked.tool_calls] == [
        ("c1", "search", "found x", 1.5),
        ("c2", "search", "", 0.0),
    ]
    assert "hunter2" not in str(record)
    assert (result.role, result.tool_call_id) == ("tool", "c1")


def test_only_so_much_waits(tmp_path: Path) -> None:
    site = Site(tmp_path, OnFeedback(), pending=Pending(most=10))
    for i in range(100):
        site.recorder.record(exchange(f"chatcmpl-{i}"))
    assert len(site.pending) == 10


def test_a_record_has_the_time_at_which_it_is_stored(tmp_path: Path) -> None:
    """A round opened while it was redacted has not had it."""
    site = Site(tmp_path, SamplingRate(1.0), decode=lambda token_ids: passes())

    def passes() -> str:
        site.now_s += 5.0
        return ""

    site.recorder.record(exchange("chatcmpl-1"))
    assert [record.collected_at_s for record in site.records()] == [NOW + 10.0]  # prompt and completion were read


def test_who_has_read_up_to_a_time_has_read_what_was_committed_until_then(tmp_path: Path) -> None:
    site, seen = Site(tmp_path, SamplingRate(1.0)), list[float]()
    site.recorder.record(exchange("chatcmpl-1"))
    reader = threading.Thread(target=lambda: seen.extend(t.committed_at_s for t in site.records()))

    def clock() -> float:
        if site.store._lock.locked() and not reader.ident:
            reader.start()
            reader.join(0.2)
        return NOW + 1.0

    site.recorder.clock = clock
    assert site.contract.commit(key_id="local") == 1
    reader.join()
    assert seen == [NOW + 1.0]
