"""Tools of a real MCP server, over stdio and over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from common.chat import ToolCall
from common.errors import ConfigError
from edge_node.agent import mcp_tools as mcp_module
from edge_node.agent.mcp_tools import McpServer, mcp_tools
from edge_node.agent.tools import Toolbox, ToolOutcome
from tests.edge_node.agent import mcp_site
from tests.edge_node.agent.scripted import Says, Script, serving

PROGRAM = (sys.executable, str(Path(mcp_site.__file__)))


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    return tmp_path / "notes"


@pytest.fixture
def over_http(notes: Path) -> Iterator[str]:
    app: Starlette = mcp_site.server().streamable_http_app()

    async def with_key(request: Request, call_next: Callable[[Request], Any]) -> Response:
        if request.headers.get("authorization") != "Bearer k1":
            return PlainTextResponse("who are you?", status_code=401)
        return await call_next(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=with_key)
    with serving(app) as url:  # type: ignore[arg-type]
        yield f"{url}/mcp"


def by_stdio(notes: Path, **given: Any) -> McpServer:
    return McpServer("site", command=PROGRAM, environment={"NOTES": str(notes)}, **given)


def each(server: McpServer, *calls: tuple[str, str]) -> list[ToolOutcome]:
    async def main() -> list[ToolOutcome]:
        async with mcp_tools([server]) as tools:
            box = Toolbox(tools)
            return [await box.call(ToolCall("c", name, arguments)) for name, arguments in calls]

    return asyncio.run(main())


CALLS = (
    ("note", '{"text": "milk"}'),
    ("note", '{"text": 3}'),
    ("note", "{"),
    ("note", "[]"),
    ("fails", ""),
    ("picture", "{}"),
    ("odd_name", "{}"),
)


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_servers_tools_are_called_once_and_fail_as_observations(
    notes: Path, transport: str, request: pytest.FixtureRequest
) -> None:
    if transport == "stdio":
        server = by_stdio(notes)
    else:
        server = McpServer("site", url=request.getfixturevalue("over_http"), bearer="k1")
    got = each(server, *CALLS)
    assert [o.status for o in got] == [
        "ok", "failed", "invalid-arguments", "invalid-arguments", "failed", "ok", "ok"
    ]  # fmt: skip
    assert got[0].result == "noted milk"
    assert notes.read_text() == "milk\n"
    assert "valid string" in got[1].result
    assert "no such record" in got[4].result
    assert got[5].result == "[image, not text, left out]"
    assert ("SECRET_OF_OURS" in json.loads(got[6].result)["environment"]) is (transport == "http")  # it is our process


def test_a_tool_is_described_as_its_server_says(notes: Path) -> None:
    async def definitions() -> list[dict[str, Any]]:
        async with mcp_tools([by_stdio(notes, prefix="site_")]) as tools:
            return Toolbox(tools).definitions

    made = {d["function"]["name"]: d["function"] for d in asyncio.run(definitions())}
    assert set(made) == {f"site_{n}" for n in ("note", "fails", "picture", "slow", "odd_name", "dies")}
    assert made["site_note"]["description"] == "Write a line down."
    assert made["site_note"]["parameters"]["required"] == ["text"]


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "mcp_site" in " ".join(p.cmdline())]


@pytest.mark.slow
def test_the_program_ends_with_the_block_whatever_happens(notes: Path) -> None:
    async def fail() -> None:
        async with mcp_tools([by_stdio(notes)]):
            assert len(children()) == 1
            raise KeyError("ours")

    with pytest.raises(KeyError):
        asyncio.run(fail())
    assert children() == []

    async def cancelled() -> None:
        task = asyncio.create_task(fail_never())
        while not children():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def fail_never() -> None:
        async with mcp_tools([by_stdio(notes)]):
            await asyncio.sleep(60)

    asyncio.run(cancelled())
    assert children() == []


@pytest.mark.slow
def test_a_slow_tool_and_a_dead_server_are_observations(notes: Path) -> None:
    started = time.monotonic()
    got = each(by_stdio(notes, timeout_s=1.0), ("slow", '{"seconds": 1.5}'), ("dies", "{}"), ("note", '{"text": "x"}'))
    assert got[0].status in ("timeout", "failed")
    assert [o.status for o in got[1:]] == ["failed", "failed"]
    assert all(o.result.startswith("error: ") for o in got)
    assert time.monotonic() - started < 15


@pytest.mark.slow
def test_a_server_that_died_is_started_again_for_the_next_call_and_not_too_often(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with mcp_tools([by_stdio(notes)]) as tools:
            box = Toolbox(tools)

            async def call(name: str, arguments: str = "{}") -> ToolOutcome:
                return await box.call(ToolCall("c", name, arguments))

            assert (await call("note", '{"text": "a"}')).status == "ok"
            assert (await call("dies")).status == "failed"  # and is not called again
            early = await call("note", '{"text": "b"}')
            assert (early.status, early.result) == ("failed", "error: MCP server site is gone")
            monkeypatch.setattr(mcp_module, "RESTART_EVERY_S", 0.0)
            both = await asyncio.gather(*(call("note", f'{{"text": "{text}"}}') for text in "cd"))
            assert [o.status for o in both] == ["ok", "ok"]
            assert len(children()) == 1  # one in its place, not one a call
            assert (await call("dies")).status == "failed"
            assert (await call("note", '{"text": "e"}')).status == "ok"
        assert children() == []

    asyncio.run(main())
    assert notes.read_text().split() == ["a", *sorted(notes.read_text().split()[1:3]), "e"]


@pytest.mark.slow
def test_a_server_that_does_not_come_back_is_an_observation(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(Path(mcp_site.__file__).read_text())
    monkeypatch.setattr(mcp_module, "RESTART_EVERY_S", 0.0)

    async def main() -> list[ToolOutcome]:
        server = McpServer("site", command=(sys.executable, str(program)), environment={"NOTES": str(notes)})
        async with mcp_tools([server]) as tools:
            box = Toolbox(tools)
            await box.call(ToolCall("c", "dies", "{}"))
            program.write_text("raise SystemExit(1)")
            return [await box.call(ToolCall("c", "note", '{"text": "x"}')) for _ in range(2)]

    for outcome in asyncio.run(main()):
        assert outcome.status == "failed"
        assert "MCP server site cannot be used" in outcome.result


@pytest.mark.slow
def test_servers_that_cannot_be_used_are_named(notes: Path, over_http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_module, "_START_S", 2.0)
    unusable = [
        McpServer("gone", command=("/does/not/exist",)),
        McpServer("other", command=(*PROGRAM, "not-mcp")),
        McpServer("deaf", command=(*PROGRAM, "deaf")),
        McpServer("nobody", url="http://127.0.0.1:9/mcp"),
        McpServer("keyless", url=over_http),
    ]
    for server in unusable:
        with pytest.raises(ConfigError, match=f"MCP server {server.name} cannot be used"):
            each(server)
    assert children() == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"command": "rm -rf x"}, "must be a list"),
        ({}, "either a command or a url"),
        ({"command": ("a",), "url": "http://x/"}, "either a command or a url"),
        ({"url": "file:///etc/passwd"}, "must be http"),
        ({"url": "http://user:secret@host/"}, "without credentials"),
        ({"url": "http://host.example/mcp", "bearer": "k"}, "only sent over https"),
        ({"command": ("a",), "bearer": "k"}, "a key is for a url"),
    ],
)
def test_settings_that_would_be_unsafe_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        McpServer("s", **given)
    assert "secret" not in str(raised.value)


def test_a_key_is_not_shown() -> None:
    assert "k1" not in repr(McpServer("s", url="https://host/mcp", bearer="k1"))


def test_an_agent_uses_them(script: Script, notes: Path) -> None:
    from openai import AsyncOpenAI

    from common.chat import Message
    from edge_node.agent.loop import Agent

    script.then(Says(calls=(("c1", "note", '{"text": "a"}'), ("c2", "note", '{"text": "b"}'))), Says("Both noted."))

    async def main() -> str:
        async with mcp_tools([by_stdio(notes)]) as tools, AsyncOpenAI(base_url=script.url, api_key="x") as client:
            turn = await Agent(client, tools=Toolbox(tools)).run([Message("user", "note a and b")])
            assert [o.result for o in turn.outcomes] == ["noted a", "noted b"]
            return turn.answer

    assert asyncio.run(main()) == "Both noted."
    assert sorted(notes.read_text().split()) == ["a", "b"]
