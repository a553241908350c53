"""Limits, slow clients, and stopping, on raw sockets where a client library would not misbehave enough."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import psutil
import pytest
import uvicorn
from openai import OpenAI

from common.inference.batching import Batcher
from common.inference.constraints import Grammars
from edge_node.config import LimitSettings
from edge_node.serving.chat_service import ChatService
from edge_node.serving.event_stream import EventStream, client_left
from edge_node.serving.gate import GateState
from edge_node.serving.openai_api import create_app
from edge_node.serving.server import LARGEST_HEADERS, NodeServer, _protocol
from tests.edge_node.serving.conftest import Served, on_loopback
from tests.edge_node.serving.test_openai_api import ASK

Open = Callable[..., tuple[str, NodeServer]]


@pytest.fixture
def opened(served: Served) -> Iterator[Open]:
    """The session's engine behind a server with limits of a test's own."""
    with ExitStack() as stack:

        def open_(service: ChatService | None = None, **limits: Any) -> tuple[str, NodeServer]:
            settings = LimitSettings(**limits)
            app = create_app(service or served.service, served.router, served.recorded, provider="p", limits=settings)
            return stack.enter_context(on_loopback(app, limits=settings))

        yield open_


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head(length: int, *more: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def everything(connection: socket.socket) -> bytes:
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except (TimeoutError, ConnectionError):
        pass
    return received


def test_a_large_body_is_refused_without_being_held(opened: Open) -> None:
    url, _ = opened(body_bytes=100_000)
    body = json.dumps({**ASK, "messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    for content in (body, iter([body[:5_000_000], body[5_000_000:]])):  # with a length, and in chunks
        response = httpx2.post(
            f"{url}/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    del body, content, response
    before = psutil.Process().memory_info().rss
    most = before

    def endless() -> Iterator[bytes]:
        nonlocal most
        piece = b"x" * 2**20
        for _ in range(60):
            yield piece
            most = max(most, psutil.Process().memory_info().rss)

    kind = {"content-type": "application/json"}
    assert httpx2.post(f"{url}/v1/chat/completions", content=endless(), headers=kind).status_code == 413
    assert most - before < 30_000_000
    with connected(url) as connection:  # one that says what it would send, and waits
        connection.sendall(head(10**9, "Expect: 100-continue"))
        assert b"413" in everything(connection)


def test_many_large_bodies_do_not_hold_up_others(opened: Open) -> None:
    url, _ = opened(body_bytes=100_000)
    stop = threading.Event()

    def push() -> None:
        while not stop.is_set():
            httpx2.post(
                f"{url}/v1/completions", content=b"x" * 10_000_000, headers={"content-type": "application/json"}
            )

    pushing = [threading.Thread(target=push) for _ in range(3)]
    for thread in pushing:
        thread.start()
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30) as client:
        for _ in range(5):
            assert client.chat.completions.create(**ASK).choices
    stop.set()
    for thread in pushing:
        thread.join()


def test_a_body_that_comes_too_slowly_is_given_up(opened: Open) -> None:
    url, _ = opened(body_timeout_s=0.3)
    with connected(url) as connection:
        connection.sendall(head(1000) + b'{"model":')
        began = time.monotonic()
        answer = everything(connection)
    assert b"408" in answer.split(b"\r\n")[0]
    assert b"request_timeout" in answer
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("sent", [b"", b"POST /v1/models HTTP/1.1\r\nHost: loc"])
def test_headers_that_never_end_are_given_up(opened: Open, sent: bytes) -> None:
    url, _ = opened(header_timeout_s=0.3)
    with connected(url) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert everything(connection) == b""
    assert time.monotonic() - began < 5


def test_headers_between_two_requests_are_given_up_too(opened: Open) -> None:
    url, _ = opened(header_timeout_s=0.3)
    with connected(url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET /healthz HT")
        assert everything(connection) == b""


def test_endless_headers_are_cut(opened: Open) -> None:
    url, _ = opened()
    with connected(url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            for _ in range(100):
                connection.sendall(b"x" * LARGEST_HEADERS)
                time.sleep(0.01)


def test_many_slow_clients_do_not_hold_up_others(opened: Open) -> None:
    url, _ = opened(requests_per_key=1000)
    slow = [connected(url) for _ in range(200)]
    for index, connection in enumerate(slow):
        connection.sendall(head(1000)[: 40 if index % 2 else None])
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30) as client:
        assert client.chat.completions.create(**ASK).choices
    for connection in slow:
        connection.close()


def test_only_json_is_read(opened: Open) -> None:
    url, _ = opened()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = httpx2.post(f"{url}/v1/chat/completions", content=json.dumps(ASK), headers={"content-type": kind})
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_media_type"
    kind = "application/json; charset=utf-8"
    assert httpx2.post(f"{url}/v1/chat/completions", json=ASK, headers={"content-type": kind}).status_code == 200


def test_a_key_has_only_so_many_requests_open(opened: Open, served: Served) -> None:
    url, server = opened(requests_per_key=2)
    long = {**ASK, "max_tokens": 400, "stream": True}
    with ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(httpx2.stream("POST", f"{url}/v1/chat/completions", json=long))
            assert stream.status_code == 200
        held = [connected(url) for _ in range(2)]
        refused = [httpx2.post(f"{url}/v1/chat/completions", json=ASK) for _ in range(1)]
        if server._state.open_requests == 2:  # the streams may be over by now on a fast machine
            assert refused[0].status_code == 429
        for connection in held:
            connection.close()
    with connected(url) as one, connected(url) as two:  # two that have sent half a request
        for connection in (one, two):
            connection.sendall(head(1000))
        deadline = time.monotonic() + 5
        while server._state.open_requests < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        response = httpx2.post(f"{url}/v1/chat/completions", json=ASK)
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert httpx2.get(f"{url}/healthz").status_code == 200
    while server._state.open_requests and time.monotonic() < deadline + 5:
        time.sleep(0.01)
    assert httpx2.post(f"{url}/v1/chat/completions", json=ASK).status_code == 200


def test_a_full_queue_asks_to_come_back_and_everyone_is_served_in_the_end(
    opened: Open, served: Served, grammars: Grammars
) -> None:
    batcher = Batcher(served.engine, max_waiting=4)
    service = ChatService(served.service.tokenizer, batcher, grammars)
    url, _ = opened(service)

    async def ask_all() -> list[int]:
        async with httpx2.AsyncClient(timeout=60) as http:

            async def ask(index: int) -> list[int]:
                codes = []
                while not codes or codes[-1] == 429:
                    stream = {**ASK, "stream": index % 2 == 0}
                    response = await http.post(f"{url}/v1/chat/completions", json=stream)
                    codes.append(response.status_code)
                    if codes[-1] == 429:
                        assert response.json()["error"]["code"] == "rate_limit_exceeded"
                        await asyncio.sleep(int(response.headers["retry-after"]) / 10)
                return codes

            return [code for codes in await asyncio.gather(*map(ask, range(60))) for code in codes]

    codes = asyncio.run(ask_all())
    assert codes.count(200) == 60
    assert set(codes) == {200, 429}
    batcher.close()


def test_a_sites_own_limits_hold(opened: Open, served: Served, grammars: Grammars) -> None:
    service = ChatService(served.service.tokenizer, served.batcher, grammars, max_prompt_characters=50)
    url, _ = opened(service, max_tokens=20, choices=2)
    for changes, code in (
        ({"max_tokens": 21}, 400),
        ({"n": 3}, 400),
        ({"messages": [{"role": "user", "content": "1 " * 26}]}, 400),
        ({"max_tokens": 20, "n": 2}, 200),
    ):
        response = httpx2.post(f"{url}/v1/chat/completions", json={**ASK, "max_tokens": 5, **changes})
        assert response.status_code == code, response.text


def test_a_node_that_stops_finishes_what_it_began(served: Served, opened: Open) -> None:
    url, server = opened()
    long = {**ASK, "max_tokens": 300, "logit_bias": {str(served.service.tokenizer.encode_text("7")[0]): 100}}
    got: list[httpx2.Response] = []
    asking = threading.Thread(
        target=lambda: got.append(httpx2.post(f"{url}/v1/chat/completions", json=long, timeout=60))
    )
    asking.start()
    deadline = time.monotonic() + 10
    while server._state.open_requests == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    server.handle_exit(signal.SIGTERM, None)
    refused = httpx2.post(f"{url}/v1/chat/completions", json=ASK)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "service_unavailable"
    assert httpx2.get(f"{url}/readyz").status_code == 503
    assert httpx2.get(f"{url}/healthz").status_code == 200
    asking.join(timeout=30)
    assert got[0].status_code == 200
    assert got[0].json()["usage"]["completion_tokens"] == 300
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            httpx2.get(f"{url}/healthz")
        except httpx2.TransportError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the server goes on")


def test_a_node_does_not_wait_for_ever(served: Served, opened: Open) -> None:
    url, server = opened(shutdown_s=0.3)
    with connected(url) as connection:
        connection.sendall(head(1000))
        while server._state.open_requests == 0:
            time.sleep(0.002)
        began = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        everything(connection)
    assert time.monotonic() - began < 8


def test_without_keys_only_this_machine_is_answered(opened: Open) -> None:
    url, _ = opened()
    port = url.rsplit(":", 1)[1]
    for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert httpx2.get(f"{url}/v1/models", headers={"host": host}).status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", ""):
        assert httpx2.get(f"{url}/v1/models", headers={"host": host}).status_code == 403
    own, other = f"http://127.0.0.1:{port}", "https://evil.example"
    assert httpx2.post(f"{url}/v1/completions", headers={"origin": own}, json={}).status_code == 400
    assert httpx2.post(f"{url}/v1/completions", headers={"origin": other}, json={}).status_code == 403
    assert httpx2.post(f"{url}/v1/completions", headers={"origin": "null"}, json={}).status_code == 403


def test_a_reader_that_stands_still_is_given_up() -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # a full buffer that nobody empties

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def left() -> float:
        began = time.monotonic()
        stream = EventStream(events(), headers={}, send_timeout_s=0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream({"type": "http"}, receive, send), timeout=5)
        assert closed == [True]  # now, and not when somebody collects it
        return time.monotonic() - began

    assert asyncio.run(left()) < 4


def test_a_connection_that_is_not_read_is_closed() -> None:
    """Closing waits until everything was sent; a reader that stands still would keep it for ever."""
    paused: list[bool] = []

    class Seen(_protocol(5.0, 0.2)):  # type: ignore[misc]
        def pause_writing(self) -> None:
            super().pause_writing()
            paused.append(True)

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.ensure_future(client_left(receive))
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)

    async def main() -> None:
        config = uvicorn.Config(endless, port=0, http=Seen, ws="none", lifespan="off", log_level="critical")
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        client = await asyncio.open_connection("127.0.0.1", port, limit=1024)  # a reader that is let go of would end it
        writer = client[1]
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await writer.drain()
        while not paused:  # nothing is read, so the buffers fill
            await asyncio.sleep(0.01)
        for _ in range(100):
            if not server.server_state.connections:
                break
            await asyncio.sleep(0.05)
        assert not server.server_state.connections
        server.should_exit = True
        await serving
        writer.close()

    asyncio.run(main())


def test_every_request_is_logged_without_its_content(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    url, _ = opened()
    with caplog.at_level(logging.INFO):
        httpx2.post(f"{url}/v1/chat/completions", json={**ASK, "user": "jane"})
        httpx2.post(f"{url}/v1/chat/completions", json={**ASK, "secret": "jane"})
        httpx2.get(f"{url}/jane")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and sum(r.name == "headwater.requests" for r in caplog.records) < 3:
            time.sleep(0.01)  # a line is written when its response has gone out
    ours = [record.message for record in caplog.records if record.name.startswith("headwater")]
    lines = [json.loads(message) for message in ours]
    assert [(line["route"], line["status"]) for line in lines] == [
        ("/v1/chat/completions", 200),
        ("/v1/chat/completions", 400),
        ("unmatched", 404),
    ]
    assert lines[0]["arm"] == "stable"
    assert lines[0]["version"] == "v0"
    assert lines[0]["completion_tokens"] > 0
    assert lines[0]["key"] == "local"
    assert not any("jane" in message or "23+45" in message for message in ours)


def test_a_busy_node_asks_to_come_back_when_the_others_are_done() -> None:
    state = GateState()
    assert state.retry_after_s == 1
    for _ in range(200):
        state.took(7.5)
    assert state.retry_after_s == 8
    for _ in range(200):
        state.took(1000.0)
    assert state.retry_after_s == 30
