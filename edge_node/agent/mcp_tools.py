"""Tools of MCP servers: started as a program (stdio), or reached over streamable HTTP.

A program is given as a list of arguments and never as a line for a shell, and gets only
the environment it is given beside the harmless part of ours. A server may offer tools and
nothing else: it cannot ask the model or the user anything through us.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from mcp.types import Tool as OfferedTool

from common.errors import ConfigError
from edge_node.agent.tools import (
    DEFAULT_RESULT_CHARACTERS,
    DEFAULT_TIMEOUT_S,
    NAME,
    InvalidArguments,
    Tool,
    ToolFailed,
)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_START_S = 30.0
_END_S = 8.0  # the client gives a program 2 s to end by itself, then 2 s after each signal
_MOST_TOOLS = 128
RESTART_EVERY_S = 30.0

_Ready = tuple[Client, list[OfferedTool]]


@dataclass(frozen=True)
class McpServer:
    """One server.

    Attributes:
        command: program and arguments; or
        url: of a streamable HTTP endpoint.
        environment: for the program, beside PATH, HOME and the like; nothing else of ours is passed on.
        bearer: sent to `url` as Authorization; needs https, or loopback.
        prefix: put before the names of this server's tools.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    bearer: str = field(default="", repr=False)
    prefix: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S
    result_characters: int = DEFAULT_RESULT_CHARACTERS

    def __post_init__(self) -> None:
        if isinstance(self.command, str):
            raise ConfigError(f"MCP server {self.name}: command must be a list of program and arguments, not a line")
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"MCP server {self.name}: give either a command or a url")
        if self.url:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
                raise ConfigError(f"MCP server {self.name}: url must be http(s)://host/path, without credentials")
            if self.bearer and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
                raise ConfigError(f"MCP server {self.name}: a key is only sent over https, or on this machine")
        elif self.bearer:
            raise ConfigError(f"MCP server {self.name}: a key is for a url; give a program its own by environment")


@asynccontextmanager
async def mcp_tools(servers: Sequence[McpServer]) -> AsyncIterator[list[Tool]]:
    """The tools of all servers, which run until the end of the block.

    Raises:
        ConfigError: a server cannot be started, or does not speak MCP.
    """
    connections: list[_Connection] = []
    tools: list[Tool] = []
    try:
        for server in servers:
            connections.append(_Connection(server))
            offered = await connections[-1].offered()
            tools.extend(_tool(server, connections[-1], tool) for tool in offered)
        yield tools
    finally:
        await _ended([task for connection in connections for task in connection.stop()])


class _Connection:
    """One server, and another one in its place where it is gone; used from one event loop.

    The call that finds it gone fails and is not repeated: the tool may have run. The next one starts the server
    again, at most every RESTART_EVERY_S.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []
        self._start()

    def _start(self) -> None:
        self._gone = False
        self._started_s = time.monotonic()
        self._stopping = asyncio.Event()
        self._ready: asyncio.Future[_Ready] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # also where nobody waits
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(_serve(self._server, self._ready, self._stopping)))

    async def offered(self) -> list[OfferedTool]:
        """What a server that has just been started offers; raises ConfigError where it does not answer."""
        try:
            _, tools = await asyncio.wait_for(asyncio.shield(self._ready), _START_S)
        except TimeoutError:
            self._tasks[-1].cancel()
            why = f"no answer within {_START_S:g} s"
            raise ConfigError(f"MCP server {self._server.name} cannot be used: {why}") from None
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """One call, once.

        Raises:
            ToolFailed: the server refuses it, or is gone.
        """
        if self._gone and time.monotonic() - self._started_s >= RESTART_EVERY_S:
            self._stopping.set()
            self._start()
        if self._gone:
            raise ToolFailed(f"MCP server {self._server.name} is gone")
        try:
            client, _ = await asyncio.shield(self._ready)
        except ConfigError as error:
            self._gone = True
            raise ToolFailed(str(error)) from error
        used = self._ready
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            self._gone |= error.code == CONNECTION_CLOSED and used is self._ready
            raise ToolFailed(f"MCP server {self._server.name}: {error}") from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.HTTPError) as error:
            self._gone |= used is self._ready  # and not one that has taken its place meanwhile
            raise ToolFailed(f"MCP server {self._server.name} is gone: {type(error).__name__}") from error

    def stop(self) -> list[asyncio.Task[None]]:
        """Let it end; the tasks that end with it."""
        self._stopping.set()
        return self._tasks


async def _serve(server: McpServer, ready: asyncio.Future[_Ready], stopping: asyncio.Event) -> None:
    """Hold one server open in a task of its own, so that its failures and its cancel scopes stay its own."""
    try:
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(_client(server, opened))
            offered = await _offered(client)
            if not ready.done():
                ready.set_result((client, offered))
            await stopping.wait()
    except Exception as error:  # whatever the transport makes of a foreign program or address
        if not ready.done():
            ready.set_exception(ConfigError(f"MCP server {server.name} cannot be used: {_told(error)}"))


async def _ended(running: list[asyncio.Task[None]]) -> None:
    """Wait until the servers have ended by themselves, and no longer than that may take."""
    waiting = [task for task in running if not task.done()]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=_END_S)
    finally:
        for task in waiting:
            if not task.done():
                task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _client(server: McpServer, opened: AsyncExitStack) -> Client:
    if server.command:
        program, *arguments = server.command
        target: Any = StdioServerParameters(command=program, args=arguments, env=dict(server.environment))
    else:
        headers = {"authorization": f"Bearer {server.bearer}"} if server.bearer else {}
        timeout = httpx2.Timeout(30.0, connect=5.0, read=300.0)  # of a stream that stays open; a call has its own
        http = httpx2.AsyncClient(headers=headers, timeout=timeout, follow_redirects=False, trust_env=False)
        opened.push_async_exit(http)
        target = streamable_http_client(server.url, http_client=http)
    return Client(target)


async def _offered(client: Client) -> list[OfferedTool]:
    tools: list[OfferedTool] = []
    cursor: str | None = None
    while len(tools) <= _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)
        cursor = page.next_cursor
        if not cursor:
            return tools
    raise ConfigError(f"it offers more than {_MOST_TOOLS} tools")


def _tool(server: McpServer, connection: _Connection, offered: OfferedTool) -> Tool:
    name = server.prefix + "".join(c if NAME.fullmatch(c) else "_" for c in offered.name)

    async def run(text: str) -> str:
        try:
            arguments = json.loads(text if text.strip() else "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidArguments(f"arguments: Invalid JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise InvalidArguments("arguments: must be an object")
        result = await connection.call(offered.name, arguments)
        said = _text_of(result)
        if result.is_error:
            raise ToolFailed(said or "the tool failed and did not say why")
        return said

    return Tool(name, offered.description or "", offered.input_schema, run, server.timeout_s, server.result_characters)


def _text_of(result: CallToolResult) -> str:
    """What a result says in text; other content is named, not shown."""
    parts = []
    for block in result.content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type}, not text, left out]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    return "\n".join(parts)


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or type(error).__name__
