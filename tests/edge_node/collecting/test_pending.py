from __future__ import annotations

import gc
import tracemalloc
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chat import Message, ToolCall
from edge_node.collecting.pending import Held, Pending, recorded
from edge_node.marking import Mark
from edge_node.serving.exchange import Exchange, TokenLogprob
from tests.edge_node.collecting.exchanges import exchange


def held(name: str, at_s: float = 0.0, text: str = "fine") -> Held:
    return Held(exchange(name, text), held_since_s=at_s)


def test_what_waits_too_long_is_forgotten_whatever_is_said_meanwhile() -> None:
    pending = Pending(wait_s=10.0)
    pending.hold(held("a", 0.0))
    pending.hold(held("b", 5.0))
    kept = pending.get("a", now_s=10.0)
    assert kept is not None
    pending.hold(replace(kept, marking=Mark(("good",))))
    again = pending.get("a", now_s=10.0)
    assert again is not None and again.marking == Mark(("good",))
    assert pending.get("a", now_s=10.1) is None
    assert len(pending) == 1
    pending.forget_old(now_s=15.1)
    assert len(pending) == 0


def test_a_large_exchange_makes_room_or_is_not_kept() -> None:
    one = held("a").size_bytes
    pending = Pending(most_bytes=3 * one)
    for name in "abc":
        pending.hold(held(name))
    assert len(pending) == 3
    pending.hold(held("d", text="x" * one))
    assert pending.get("a", now_s=0.0) is None and pending.get("d", now_s=0.0) is not None
    before = len(pending)
    pending.hold(held("e", text="x" * 3 * one))
    assert len(pending) == before and pending.get("e", now_s=0.0) is None


LONG = "é" * 100_000

ASKED: dict[str, dict[str, Any]] = {
    "content": {"messages": [Message("user", LONG)]},
    "reasoning": {"messages": [Message("assistant", "x", reasoning=LONG)]},
    "name": {"messages": [Message("user", "x", LONG)]},
    "arguments": {"messages": [Message("assistant", None, tool_calls=(ToolCall("c", "f", LONG),))]},
    "result's call": {"messages": [Message("tool", "x", tool_call_id=LONG)]},
    "user": {"user": LONG},
    "metadata": {"metadata": {"a": LONG}},
    "conversation": {"conversation_id": LONG},
    "mark": {"marking": Mark((LONG,))},
}


@pytest.mark.parametrize("place", ASKED)
def test_every_text_of_a_request_takes_room(place: str) -> None:
    assert Held(recorded(exchange("a", **ASKED[place])), 0.0).size_bytes > len(LONG)


@pytest.mark.parametrize("place", ["text", "content", "reasoning", "arguments"])
def test_every_text_of_an_answer_takes_room(place: str) -> None:
    call = ToolCall("c", "f", LONG if place == "arguments" else "{}")
    message = Message(
        "assistant",
        LONG if place == "content" else "x",
        tool_calls=(call,),
        reasoning=LONG if place == "reasoning" else None,
    )
    one = exchange("a")
    answer = replace(one.answers[0], text=LONG if place == "text" else "x", message=message)
    assert Held(recorded(replace(one, answers=[answer])), 0.0).size_bytes > len(LONG)


def test_what_is_charged_is_about_what_is_taken() -> None:
    """Memory that Python hands out, with many small messages and log-probabilities, is at most what was charged."""

    def asked(name: str) -> Exchange:
        messages = [Message("user", f"{name} {i}") for i in range(500)]
        one = exchange(name, messages=messages, metadata={"a": name * 100})
        tokens = [10_000 + i for i in range(2000)]
        top: list[tuple[tuple[int, float], ...]] = [((i, -0.1 - i), (i + 1, -0.2 - i)) for i in range(2000)]
        generation = replace(one.answers[0].generation, token_ids=tokens, logprobs=[-0.5 - i for i in tokens], tops=top)
        shown = tuple(TokenLogprob(f"token {i}", b"x" * 20, -0.5 - i) for i in range(2000))
        answer = replace(one.answers[0], generation=generation, logprobs=shown)
        tools = ({"type": "function", "function": {"name": name, "parameters": {f"p{i}": {} for i in range(2000)}}},)
        return replace(one, request=replace(one.request, tools=tools), answers=[answer])

    gc.collect()
    tracemalloc.start()
    held_ones = [Held(recorded(asked(f"a{i}")), 0.0) for i in range(20)]
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    charged = sum(one.size_bytes for one in held_ones)
    assert taken < charged < 4 * taken


@given(
    st.lists(
        st.tuples(st.sampled_from(["hold", "drop", "get"]), st.sampled_from("abcdefg"), st.integers(0, 3)), max_size=60
    ),
    st.integers(1, 4),
)
def test_it_never_holds_more_than_it_may_and_loses_the_oldest_first(
    steps: list[tuple[str, str, int]], most: int
) -> None:
    pending, wait_s = Pending(most=most, wait_s=5.0), 5.0
    model: OrderedDict[str, float] = OrderedDict()
    now_s = 0.0
    for action, name, later in steps:
        now_s += later
        if action == "hold":
            since = model.get(name, now_s)
            pending.hold(held(name, since))
            model[name] = since
            while len(model) > most:
                model.popitem(last=False)
        elif action == "drop":
            pending.drop(name)
            model.pop(name, None)
        else:
            for old in [n for n, since in model.items() if now_s - since > wait_s]:
                del model[old]
            found = pending.get(name, now_s=now_s)
            assert (found is not None) == (name in model)
        assert len(pending) == len(model) <= most
    pending.clear()
    assert len(pending) == 0 and pending._bytes == 0


def test_its_bytes_add_up() -> None:
    pending = Pending()
    for name in ("a", "b", "a", "c"):
        pending.hold(held(name, text=name * 1000))
    assert pending._bytes == sum(h.size_bytes for h in pending._held.values()) > 3 * 2000
    for name in ("a", "b", "c", "c"):
        pending.drop(name)
    assert pending._bytes == 0


@pytest.mark.parametrize("choices", [1, 3])
def test_an_exchange_weighs_at_least_its_texts(choices: int) -> None:
    large = exchange("a", "x" * 100_000, choices=choices)
    assert Held(large, 0.0).size_bytes >= choices * 100_000
