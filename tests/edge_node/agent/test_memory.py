"""The window: whole turns, within the limits, and never a call without its results."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.chat import Message, ToolCall
from edge_node.agent.memory import Window, estimated_tokens


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """System turns, then exchanges as an agent makes them: a question, any number of steps, an answer or none yet."""
    made = [Message("system", "s" * draw(st.integers(0, 20))) for _ in range(draw(st.integers(0, 2)))]
    number = 0
    for _ in range(draw(st.integers(0, 5))):
        made.append(Message("user", "q" * draw(st.integers(0, 40))))
        for _ in range(draw(st.integers(0, 3))):
            calls = []
            for _ in range(draw(st.integers(1, 3))):
                number += 1
                calls.append(ToolCall(f"c{number}", "tool", "{}"))
            made.append(Message("assistant", None, tool_calls=tuple(calls)))
            made.extend(Message("tool", "r" * draw(st.integers(0, 40)), tool_call_id=c.id) for c in calls)
        if draw(st.booleans()):
            made.append(Message("assistant", "a" * draw(st.integers(0, 40))))
    return made


LIMITS = st.none() | st.integers(0, 20)


@given(conversations(), LIMITS, st.none() | st.integers(0, 200))
def test_what_is_shown_is_whole(conversation: list[Message], messages: int | None, tokens: int | None) -> None:
    window = Window(messages, tokens)
    shown = window.shown(conversation)
    at = iter(conversation)
    assert all(any(m is c for c in at) for m in shown)  # a subsequence: nothing made up, order kept

    called = [c.id for m in shown for c in m.tool_calls]
    assert called == [m.tool_call_id for m in shown if m.role == "tool"]  # every call with its results, in order

    assert [m for m in shown if m.role == "system"] == [m for m in conversation if m.role == "system"]
    questions = [m for m in conversation if m.role == "user"]
    if questions:
        assert any(m is questions[-1] for m in shown)
        assert shown[-1] is conversation[-1]
        assert next(m.role for m in shown if m.role != "system") == "user"
    assert window.shown(shown) == shown


@given(conversations(), st.integers(0, 20))
def test_the_limit_holds_unless_what_must_be_shown_needs_more(conversation: list[Message], limit: int) -> None:
    shown = Window(messages=limit).shown(conversation)
    needed = Window(messages=0).shown(conversation)
    assert len(shown) <= max(limit, len(needed))
    tokens = sum(map(estimated_tokens, Window(tokens=10 * limit).shown(conversation)))
    assert tokens <= max(10 * limit, sum(map(estimated_tokens, needed)))


@given(conversations())
def test_without_limits_everything_is_shown(conversation: list[Message]) -> None:
    assert Window().shown(conversation) == conversation


@given(conversations(), st.integers(0, 20))
def test_a_larger_window_shows_no_less(conversation: list[Message], limit: int) -> None:
    smaller, larger = (Window(messages=n).shown(conversation) for n in (limit, limit + 1))
    assert len(smaller) <= len(larger)


@given(conversations())
def test_halving_ends(conversation: list[Message]) -> None:
    window: Window | None = Window()
    counts = []
    while window is not None:
        counts.append(len(window.shown(conversation)))
        window = window.halved(conversation)
    assert counts == sorted(set(counts), reverse=True)
    assert counts[-1] == len(Window(messages=0).shown(conversation))


def test_the_latest_exchanges_are_shown() -> None:
    exchanges = [[Message("user", f"q{i}"), Message("assistant", f"a{i}")] for i in range(4)]
    conversation = [Message("system", "s"), *(m for pair in exchanges for m in pair), Message("user", "now")]
    shown = Window(messages=4).shown(conversation)
    assert [m.content for m in shown] == ["s", "q3", "a3", "now"]
    assert [m.content for m in Window(messages=3).shown(conversation)] == [
        "s",
        "now",
    ]  # not an answer without its question
