"""The chat page, and the site's agent over HTTP for it.

| path | what |
|---|---|
| `GET /`, `GET /chat` | the page; one file, nothing from elsewhere |
| `GET /agent/tools` | the tools the agent has |
| `POST /agent/chat` | one turn of the agent, as server-sent events |

The agent asks this node's own API, over the address the request came in by and with
the caller's own key, so what it asks is routed, limited and recorded like any other
request of that caller. Its tools run in the node's process.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.resources import files
from typing import Annotated, Any

import httpx2
from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import HTMLResponse, Response
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from common.chat import Message
from common.errors import ConfigError, TrustError
from common.telemetry import log_event
from edge_node.agent.loop import Agent, Finished, ModelUnavailable, TextDelta, ToolFinished, ToolStarted, Turn
from edge_node.agent.settings import AgentSettings
from edge_node.agent.site_agent import site_agent, site_tools
from edge_node.agent.tools import Toolbox, load_tool
from edge_node.marking import LONGEST_ID
from edge_node.serving.completions import to_message
from edge_node.serving.errors import SERVER, ApiError
from edge_node.serving.event_stream import EventStream
from edge_node.serving.keys import CHAT, Caller, bearer_of, require
from edge_node.serving.wire import ChatMessage, Text

logger = logging.getLogger("headwater.edge")

OPEN_PATHS = ("/", "/chat")
"""The page needs no key; what it asks does."""

_CONNECTIONS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
_May = Annotated[Caller, Depends(require(CHAT))]
_Conversation = Annotated[str, Header(max_length=512)]
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}}
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


class AgentRequest(BaseModel):
    """A conversation whose last message is to be answered; `user` is who asks, as in the OpenAI API."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    model: Annotated[str, Field(max_length=128)] = "headwater"
    user: Annotated[Text, Field(max_length=LONGEST_ID)] | None = None


class SiteAgent:
    """The site's agent in the node's process; its tools are opened with the first turn and stay.

    Raises:
        ConfigError: a tool cannot be loaded.
    """

    def __init__(self, settings: AgentSettings) -> None:
        for path in settings.tools:
            load_tool(path)  # fails at start, not in front of a user
        self._settings = settings
        self._opening: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Toolbox] | None = None
        self._http: httpx2.AsyncClient | None = None

    async def tools(self) -> Toolbox:
        """The tools, opened where they are not yet.

        Raises:
            ApiError: they cannot be used.
        """
        if self._opened is None or (self._opened.done() and self._opened.exception() is not None):
            self._opened = asyncio.get_running_loop().create_future()
            self._opening = asyncio.create_task(self._hold(self._opened))  # ends with the event loop
        try:
            return await asyncio.shield(self._opened)
        except (ConfigError, TrustError) as error:
            message = "the agent's tools cannot be used; see the node's log"
            raise ApiError(503, message, code="tools_unavailable", kind=SERVER) from error

    async def _hold(self, opened: asyncio.Future[Toolbox]) -> None:
        try:
            async with site_tools(self._settings) as tools:
                opened.set_result(tools)
                await asyncio.Event().wait()
        except (ConfigError, TrustError) as error:
            log_event(logger, "agent tools refused", reason=str(error))
            if not opened.done():
                opened.set_exception(error)

    async def agent(self, http: Request, conversation: str, model: str, user: str | None) -> Agent:
        """An agent that speaks for the caller of `http`."""
        tools = await self.tools()
        if self._http is None:
            self._http = httpx2.AsyncClient(
                timeout=self._settings.seconds, limits=_CONNECTIONS, trust_env=False, follow_redirects=False
            )
        client = AsyncOpenAI(
            base_url=f"{_own_address(http)}/v1",
            api_key=bearer_of(http.scope["headers"]) or "none",
            default_headers={
                **http.app.state.gate.inner_headers,
                **({"x-headwater-conversation": conversation} if conversation else {}),
            },
            http_client=self._http,
            max_retries=1,
        )
        sampling = {"user": user} if user else {}
        return site_agent(self._settings, client, tools, model=model, sampling=sampling)


def router(settings: AgentSettings, *, send_timeout_s: float) -> APIRouter:
    """The page and the agent of one node."""
    paths = APIRouter(tags=["agent"])
    page, policy = _page()
    site = SiteAgent(settings)

    @paths.get("/", response_class=HTMLResponse)
    @paths.get("/chat", response_class=HTMLResponse)
    async def chat_page() -> Response:
        return HTMLResponse(
            page,
            headers={
                "content-security-policy": policy,
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
                "cross-origin-opener-policy": "same-origin",
                "cache-control": "no-cache",
            },
        )

    @paths.get("/agent/tools")
    async def tools(_: _May) -> dict[str, Any]:
        return {"tools": (await site.tools()).definitions}

    @paths.post("/agent/chat", responses=_EVENTS)
    async def chat(
        body: AgentRequest, http: Request, _: _May, x_headwater_conversation: _Conversation = ""
    ) -> Response:
        agent = await site.agent(http, x_headwater_conversation, body.model, body.user)
        events = _events(agent, [to_message(message) for message in body.messages])
        return EventStream(events, headers={}, send_timeout_s=send_timeout_s)

    return paths


async def _events(agent: Agent, conversation: list[Message]) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(agent.events(conversation)) as events:
            async for event in events:
                match event:
                    case TextDelta(text):
                        yield _event("text", text=text)
                    case ToolStarted(call):
                        yield _event("call", id=call.id, name=call.name, arguments=call.arguments)
                    case ToolFinished(outcome):
                        call = outcome.call
                        said = {"status": outcome.status, "result": outcome.result, "duration_s": outcome.duration_s}
                        yield _event("result", id=call.id, name=call.name, arguments=call.arguments, **said)
                    case Finished(turn):
                        yield _event("done", ended=turn.ended, version=turn.version, arm=turn.arm, **_kept(turn))
    except ModelUnavailable as error:
        yield _event("error", message=str(error), **_kept(error.turn))


def _kept(turn: Turn) -> dict[str, Any]:
    return {"messages": [m.as_openai() for m in turn.messages], "response_ids": list(turn.response_ids)}


def _event(kind: str, **fields: Any) -> bytes:
    return f"data: {json.dumps({'type': kind, **fields}, separators=(',', ':'))}\n\n".encode()


def _own_address(http: Request) -> str:
    """Where the request came in: the socket's own address, which no client chooses."""
    host, port = http.scope["server"]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _page() -> tuple[str, str]:
    """The page, and the policy under which a browser runs its own script and style and nothing else."""
    page = files("edge_node.agent").joinpath("chat.html").read_text(encoding="utf-8")

    def hashed(tag: str) -> str:
        (block,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()

    policy = (
        f"default-src 'none'; script-src 'sha256-{hashed('script')}'; style-src 'sha256-{hashed('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy
