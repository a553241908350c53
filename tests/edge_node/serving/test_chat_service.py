"""The engine as a `Chat`, with tokens that a script plays where the model would not write them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.chat import Message
from common.inference.batching import Generation, GenerationRequest, Overloaded, Token
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Grammars
from common.inference.sampling import SamplingParameters
from edge_node.serving.chat_service import ChatService
from edge_node.serving.completions import ChunkWriter
from edge_node.serving.exchange import ChatRequest, Delta, Exchange, RequestTooLong, Unservable
from edge_node.serving.router import Choice
from tests.edge_node.serving.conftest import Served


@dataclass
class _Engine:
    context_tokens: int = 512


@dataclass
class ScriptedBatcher:
    """Plays given tokens, as the engine's thread would, one every `pause_s`; remembers how each answer ended."""

    token_ids: list[int]
    pause_s: float = 0.0
    most: int = 100
    engine: _Engine = field(default_factory=_Engine)
    ended: list[tuple[str, int]] = field(default_factory=list)
    taken: int = 0

    def submit(self, request: GenerationRequest, _: Any) -> Future[Generation]:
        if self.taken >= self.most:
            raise Overloaded("full")
        self.taken += 1
        future: Future[Generation] = Future()
        threading.Thread(target=self._play, args=(request, future), daemon=True).start()
        return future

    def _play(self, request: GenerationRequest, future: Future[Generation]) -> None:
        future.set_running_or_notify_cancel()
        drawn: list[int] = []
        reason = "length"
        for token_id in self.token_ids[: request.max_tokens]:
            time.sleep(self.pause_s)
            drawn.append(token_id)
            said = request.watch(Token(token_id, -0.5)) if request.watch else None
            if said is not None:
                reason = said
                break
        else:
            reason = "stop"
        self.ended.append((reason, len(drawn)))
        if not future.cancelled():
            future.set_result(Generation(drawn, [-0.5] * len(drawn), reason, 0.0, 0.0, 0.0))


Open = Callable[..., tuple[ChatService, ScriptedBatcher]]


@pytest.fixture
def scripted(tokenizer: ChatTokenizer, grammars: Grammars) -> Open:
    def opened(text: str, **settings: Any) -> tuple[ChatService, ScriptedBatcher]:
        batcher = ScriptedBatcher(tokenizer.encode_text(text), **settings)
        return ChatService(tokenizer, batcher, grammars), batcher  # type: ignore[arg-type]

    return opened


@pytest.fixture
def choice(served: Served) -> Choice:
    return Choice("stable", served.router.arms.stable)


def ask(**given: Any) -> ChatRequest:
    messages = given.pop("messages", [Message("user", "What is 23+45?")])
    return ChatRequest(messages, given.pop("sampling", SamplingParameters()), given.pop("max_tokens", 200), **given)


def said(service: ChatService, request: ChatRequest, choice: Choice) -> tuple[list[Delta], Exchange]:
    async def all_of_it() -> list[Delta | Exchange]:
        return [item async for item in service.stream(request, choice)]

    items = asyncio.run(all_of_it())
    exchange = items.pop()
    assert isinstance(exchange, Exchange)
    return [item for item in items if isinstance(item, Delta)], exchange


def test_a_thought_is_kept_apart_from_what_is_said(scripted: Open, choice: Choice) -> None:
    service, _ = scripted("<think>\nfirst 23, then 45\n</think>\n\nIt is 68.")
    exchange = asyncio.run(service.answer(ask(), choice))
    message = exchange.answers[0].message
    assert (message.reasoning, message.content) == ("first 23, then 45", "It is 68.")
    assert exchange.answers[0].text.startswith("<think>")
    deltas, streamed = said(service, ask(), choice)
    assert "".join(delta.reasoning for delta in deltas) == "first 23, then 45"
    assert "".join(delta.content for delta in deltas) == "It is 68."
    assert streamed.answers[0].message == message
    plain = asyncio.run(service.answer(ask(messages=[], prompt="x"), choice))
    assert plain.answers[0].message.reasoning is None


def test_a_prompt_that_ends_in_a_thought_is_gone_on_with(
    scripted: Open, choice: Choice, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda *a: [*encode(*a), *tokenizer.encode_text("<think>\n")])
    service, _ = scripted("hm</think>yes")
    message = asyncio.run(service.answer(ask(), choice)).answers[0].message
    assert (message.reasoning, message.content) == ("hm", "yes")


def test_a_call_the_model_chose_to_make_is_one(scripted: Open, choice: Choice) -> None:
    service, _ = scripted('Let me add.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>')
    tools = ({"type": "function", "function": {"name": "add"}},)
    answer = asyncio.run(service.answer(ask(tools=tools), choice)).answers[0]
    assert answer.message.content == "Let me add."
    assert [(c.name, c.arguments) for c in answer.message.tool_calls] == [("add", '{"x": 1}')]
    assert answer.finish_reason == "tool_calls"
    deltas, _ = said(service, ask(tools=tools), choice)
    assert "".join(delta.content for delta in deltas) == "Let me add."
    assert len([call for delta in deltas for call in delta.tool_calls]) == 1
    without = asyncio.run(service.answer(ask(), choice)).answers[0]
    assert without.message.tool_calls == ()
    assert without.finish_reason == "stop"


def test_a_client_that_leaves_ends_the_generation(scripted: Open, choice: Choice) -> None:
    service, batcher = scripted("1 " * 150, pause_s=0.01)

    async def leave_stream() -> None:
        stream = service.stream(ask(choices=2), choice)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    async def leave_answer() -> None:
        task = asyncio.create_task(service.answer(ask(choices=2), choice))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for leave in (leave_stream, leave_answer):
        batcher.ended.clear()
        asyncio.run(leave())
        deadline = time.monotonic() + 5
        while len(batcher.ended) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reason for reason, _ in batcher.ended] == ["cancelled"] * 2
        assert all(tokens < 60 for _, tokens in batcher.ended)


def test_if_not_all_choices_find_room_none_is_generated(scripted: Open, choice: Choice) -> None:
    service, batcher = scripted("1 " * 150, pause_s=0.01, most=2)
    for ends in (service.answer(ask(choices=3), choice), anext(service.stream(ask(choices=3), choice))):
        batcher.taken, batcher.ended = 0, []

        async def run(work: Any) -> None:
            await work

        with pytest.raises(Overloaded):
            asyncio.run(run(ends))
        deadline = time.monotonic() + 5
        while len(batcher.ended) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reason for reason, _ in batcher.ended] == ["cancelled"] * 2


def test_every_choice_ends_when_it_ends(scripted: Open, choice: Choice) -> None:
    service, _ = scripted("one two three")
    deltas, exchange = said(service, ask(choices=3, logprobs=True), choice)
    for index in range(3):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.content for delta in mine) == "one two three"
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["stop"]
        assert mine[-1].finish_reason == "stop"
        assert tuple(e for delta in mine for e in delta.logprobs) == exchange.answers[index].logprobs
    assert exchange.completion_tokens == sum(len(a.generation.token_ids) for a in exchange.answers)


def test_too_much_is_refused_before_it_is_generated(scripted: Open, choice: Choice) -> None:
    service, batcher = scripted("x")
    for request in (
        ask(messages=[Message("user", "x" * 40_000)]),
        ask(messages=[Message("user", "1 " * 600)]),
        ask(max_tokens=10_000),
    ):
        with pytest.raises(RequestTooLong):
            asyncio.run(service.answer(request, choice))
    assert batcher.taken == 0


def test_a_token_that_does_not_exist_cannot_be_biased(served: Served, choice: Choice) -> None:
    with pytest.raises(Unservable):
        asyncio.run(served.service.answer(ask(sampling=SamplingParameters(logit_bias=((10**8, 1.0),))), choice))


def test_several_calls_have_ids_and_places_of_their_own(scripted: Open, choice: Choice) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    service, _ = scripted(f"{call}\n{call}\n{call}")
    request = ask(tools=({"type": "function", "function": {"name": "add"}},), choices=2)
    deltas, exchange = said(service, request, choice)
    writer = ChunkWriter(request, choice, "headwater", include_usage=False)
    events = [json.loads(e.removeprefix("data: ")) for d in deltas for e in writer.delta(d).decode().split("\n\n") if e]
    for index, answer in enumerate(exchange.answers):
        calls = [
            call
            for event in events
            for part in event["choices"]
            if part["index"] == index
            for call in part["delta"].get("tool_calls", [])
        ]
        assert [call["index"] for call in calls] == [0, 1, 2]
        assert [call["id"] for call in calls] == [call.id for call in answer.message.tool_calls]
        assert len({call["id"] for call in calls}) == 3
