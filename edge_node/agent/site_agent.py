"""The agent as a site's settings describe it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from common.errors import ConfigError
from common.identity import read_private
from edge_node.agent.loop import Agent, Limits
from edge_node.agent.mcp_tools import McpServer, mcp_tools
from edge_node.agent.memory import Window
from edge_node.agent.settings import AgentSettings, McpSettings
from edge_node.agent.tools import Toolbox, load_tool


@asynccontextmanager
async def site_tools(settings: AgentSettings) -> AsyncIterator[Toolbox]:
    """The site's tools; its MCP servers run until the end of the block.

    Raises:
        ConfigError: a tool cannot be loaded, a server cannot be used, or two tools have one name.
        TrustError: others could read a server's key.
    """
    seconds, characters = settings.tool_seconds, settings.result_characters
    own = [load_tool(path, timeout_s=seconds, result_characters=characters) for path in settings.tools]
    servers = [_server(name, server, settings) for name, server in settings.mcp.items()]
    async with mcp_tools(servers) as offered:
        yield Toolbox([*own, *offered])


def site_agent(
    settings: AgentSettings,
    client: AsyncOpenAI,
    tools: Toolbox,
    *,
    model: str = "headwater",
    sampling: Mapping[str, Any] | None = None,
) -> Agent:
    """The site's agent on a node's API; `sampling` holds further fields of its requests."""
    return Agent(
        client,
        model=model,
        tools=tools,
        system=settings.system,
        limits=Limits(settings.steps, settings.seconds),
        window=Window(settings.window_messages, settings.window_tokens),
        sampling={"temperature": settings.temperature, **(sampling or {})},
    )


def _server(name: str, server: McpSettings, settings: AgentSettings) -> McpServer:
    bearer = ""
    if server.key_file is not None:
        try:
            bearer = read_private(server.key_file).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"agent.mcp.{name}.key_file cannot be read: {type(error).__name__}") from error
    return McpServer(
        name,
        command=server.command,
        url=server.url,
        environment=server.environment,
        bearer=bearer,
        prefix=server.prefix,
        timeout_s=settings.tool_seconds,
        result_characters=settings.result_characters,
    )
