"""Marks and hooks on their own: what is sent to whom, and that everything is put back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.resources.chat.completions import Completions

from edge_node.marking import HEADER, Mark, read_header
from edge_node.runner import AgentCall, TrainingRunner, mark_for_training
from edge_node.runner.hooks import HOOKS
from edge_node.runner.node_client import NodeClient

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ORIGINAL = Completions.__dict__["create"]

NODE = "http://node.example"


class Sent:
    """A server of chat completions that remembers the marks it was sent."""

    def __init__(self, host: str = "node.example") -> None:
        self.marks: list[Mark | None] = []
        self.url = f"http://{host}/v1"

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        header = request.headers.get(HEADER)
        self.marks.append(None if header is None else read_header(header))
        message = {"role": "assistant", "content": request.headers.get("x-own", "hi")}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        name = f"c{len(self.marks)}"
        body = {"id": name, "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return httpx2.Response(200, json=body)

    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="x", http_client=httpx2.Client(transport=httpx2.MockTransport(self)))

    def async_client(self) -> AsyncOpenAI:
        transport = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return AsyncOpenAI(base_url=self.url, api_key="x", http_client=transport)


@pytest.fixture(autouse=True)
def unhooked() -> Iterator[None]:
    yield
    assert Completions.__dict__["create"] is ORIGINAL and not HOOKS.active


def test_marks_nest_and_end_with_their_block() -> None:
    sent = Sent()
    client = sent.client()
    client.chat.completions.create(**ASK)
    with mark_for_training("outer", task_id="t1", endpoint=NODE):
        client.chat.completions.create(**ASK)
        with mark_for_training("inner", metadata={"k": "v"}, endpoint=NODE):
            client.chat.completions.create(**ASK)
        client.chat.completions.create(**ASK)
    client.chat.completions.create(**ASK)
    outer = Mark(("outer",), {}, "t1")
    assert sent.marks == [None, outer, Mark(("inner",), {"k": "v"}), outer, None]


def test_marks_of_concurrent_tasks_do_not_meet() -> None:
    sent, answers = Sent(), {}

    async def one(client: AsyncOpenAI, number: int) -> None:
        with mark_for_training(f"task-{number}", endpoint=NODE):
            await asyncio.sleep(0.001 * (number % 3))
            answer = await client.chat.completions.create(**ASK)
            answers[number] = int(answer.id[1:]) - 1

    async def main() -> None:
        async with sent.async_client() as client:
            await asyncio.gather(*(one(client, number) for number in range(20)))

    asyncio.run(main())
    for number, place in answers.items():
        assert sent.marks[place] == Mark((f"task-{number}",))


def test_a_mark_goes_to_the_node_and_to_nobody_else() -> None:
    node, other = Sent(), Sent("api.other.example")
    with mark_for_training("good", endpoint=NODE):
        node.client().chat.completions.create(**ASK)
        other.client().chat.completions.create(**ASK)
    with TrainingRunner(NODE, auto_commit=False), mark_for_training("good"):
        node.client().chat.completions.create(**ASK)
        other.client().chat.completions.create(**ASK)
    with mark_for_training("good"):  # nobody is known to be a node
        node.client().chat.completions.create(**ASK)
        other.client().chat.completions.create(**ASK)
    assert node.marks == [Mark(("good",)), Mark(("good",)), None]
    assert other.marks == [None, None, None]


def test_headers_of_business_code_stay_and_win() -> None:
    sent = Sent()
    own = {"x-own": "mine"}
    with mark_for_training("good", endpoint=NODE):
        answer = sent.client().chat.completions.create(**ASK, extra_headers=own)
        sent.client().chat.completions.create(**ASK, extra_headers={HEADER: "chosen"})
    assert answer.choices[0].message.content == "mine"
    assert own == {"x-own": "mine"}
    assert sent.marks == [Mark(("good",)), Mark(("chosen",))]


def test_a_mark_that_is_none_is_refused_where_it_is_written() -> None:
    for wrong in ({"task_id": "x" * 1000}, {"metadata": {"a b": "c"}}):
        with pytest.raises(ValueError), mark_for_training(**wrong):  # type: ignore[arg-type]
            pass
    with pytest.raises(ValueError), mark_for_training("x" * 100):
        pass


def test_a_wrapper_put_on_top_later_stays_and_nothing_is_seen_twice() -> None:
    seen: list[AgentCall] = []

    class Watcher:
        endpoint = "http://node.example:80"

        def finished(self, call: AgentCall) -> None:
            seen.append(call)

    sent, watcher, calls = Sent(), Watcher(), []
    HOOKS.watch(watcher)
    ours = Completions.create

    def traced(self: Completions, *args: Any, **arguments: Any) -> Any:
        calls.append(1)
        return ours(self, *args, **arguments)

    Completions.create = traced  # type: ignore[assignment, method-assign]
    HOOKS.unwatch(watcher)
    sent.client().chat.completions.create(**ASK)
    assert (len(calls), len(seen)) == (1, 0)
    HOOKS.watch(watcher)
    sent.client().chat.completions.create(**ASK)
    assert (len(calls), len(seen)) == (2, 1)
    Completions.create = ours  # type: ignore[method-assign]
    HOOKS.unwatch(watcher)


def test_a_watcher_that_raises_is_not_noticed() -> None:
    class Raises:
        endpoint = "http://node.example:80"

        def finished(self, call: AgentCall) -> None:
            raise RuntimeError("secret")

    watcher = Raises()
    HOOKS.watch(watcher)
    try:
        assert Sent().client().chat.completions.create(**ASK).id == "c1"
    finally:
        HOOKS.unwatch(watcher)


def test_no_proxy_of_the_environment_sees_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    class Node(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said.append((self.path, self.headers["authorization"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Node)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    try:
        with NodeClient(f"http://127.0.0.1:{server.server_port}", api_key="hw-secret", timeout_s=5) as client:
            client.commit()
    finally:
        server.shutdown()
        server.server_close()
    assert said == [("/commit", "Bearer hw-secret")]
