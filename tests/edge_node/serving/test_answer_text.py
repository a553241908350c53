"""Reading answers as they come: any cutting into pieces gives the same turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chat import ToolCall
from edge_node.serving.answer_text import Piece, Said, StopStrings, Thought, TurnReader, longest_beginning

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
MARKED = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, " ", "\n", "a", "<", "é", '{"name": 1}']
    ),
    max_size=8,
).map("".join)


def pieces(text: str, cuts: list[int], *, tools: bool, thinking: bool) -> list[Piece]:
    reader = TurnReader(tools=tools, thinking=thinking)
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    read = [p for a, b in pairwise(places) for p in reader.push(text[a:b])]
    return [*read, *reader.rest()]


def turn(read: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(p.text for p in read if isinstance(p, Thought)),
        "".join(p.text for p in read if isinstance(p, Said)),
        [(p.name, p.arguments) for p in read if isinstance(p, ToolCall)],
    )


@given(MARKED, st.lists(st.integers(0, 500)), st.booleans(), st.booleans())
def test_how_the_text_was_cut_changes_nothing(text: str, cuts: list[int], tools: bool, thinking: bool) -> None:
    whole = turn(pieces(text, [], tools=tools, thinking=thinking))
    assert turn(pieces(text, cuts, tools=tools, thinking=thinking)) == whole


@pytest.mark.parametrize(
    ("text", "thought", "said", "calls"),
    [
        ("plain", "", "plain", 0),
        (" leading and trailing ", "", " leading and trailing ", 0),
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes", 0),
        ("<think>cut off", "cut off", "", 0),
        ("<think></think>yes", "", "yes", 0),
        ("no <think>late</think>", "", "no <think>late</think>", 0),
        (f"Let me see.\n{CALL}", "", "Let me see.", 1),
        (f"{CALL}\n{CALL}\n", "", "", 2),
        (f"<think>so</think>\n{CALL}", "so", "", 1),
        ("bad <tool_call>{</tool_call> end", "", "bad <tool_call>{</tool_call> end", 0),
        (f"{CALL} then <tool_call>{{", "", " then <tool_call>{", 1),
        ("a < b <tool", "", "a < b <tool", 0),
    ],
)
def test_a_turn_is_split_as_its_marks_say(text: str, thought: str, said: str, calls: int) -> None:
    read = turn(pieces(text, [], tools=True, thinking=False))
    assert (read[0], read[1], len(read[2])) == (thought, said, calls)


def test_without_tools_a_call_is_text() -> None:
    assert turn(pieces(f"x {CALL}", [], tools=False, thinking=False)) == ("", f"x {CALL}", [])


def test_a_prompt_that_opens_a_thought_is_gone_on_with() -> None:
    assert turn(pieces("hm</think> yes", [], tools=False, thinking=True)) == ("hm", "yes", [])


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab", max_size=3)))
def test_a_stop_string_never_leaks(stops: list[str], parts: list[str]) -> None:
    stop = StopStrings(stops)
    passed = ""
    for part in parts:
        passed += stop.push(part)
        if stop.found:
            break
    text = "".join(parts)
    passed += stop.rest()
    assert text.startswith(passed)
    assert stop.released == len(passed)
    assert not any(s in passed for s in stops)
    assert stop.found == any(s in text for s in stops)
    if not stop.found:
        assert passed == text
    whole = StopStrings(stops)
    assert whole.push(text) + whole.rest() == passed


@given(st.text("ab", max_size=6), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_the_longest_beginning_is_found(text: str, marks: list[str]) -> None:
    lengths = [n for n in range(len(text) + 1) for m in marks if n < len(m) and text.endswith(m[:n])]
    assert longest_beginning(text, marks) == max(lengths, default=0)
