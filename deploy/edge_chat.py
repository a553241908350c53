"""`headwater edge chat`: talk to a running node from a terminal, with the site's own tools."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from common.chat import Message
from common.errors import ConfigError
from deploy.edge_settings import OptionalConfigFile, Overrides, edge_settings
from edge_node.config import EdgeConfig

if TYPE_CHECKING:
    from edge_node.agent.loop import Agent, Turn

KEY_VARIABLE = "HEADWATER_API_KEY"
_HELP = "/up and /down rate the last answer, /new starts over, /quit ends"
_THUMBS = {"/up": 1.0, "/down": -1.0}
_SHOWN_CHARACTERS = 300
_ENDED = {"length": "cut off at its length", "steps": "stopped: too many steps", "time": "stopped: out of time"}


def chat(
    config: OptionalConfigFile = None,
    url: Annotated[str | None, typer.Option(help="Of the node; default: where edge.toml says it listens.")] = None,
    model: Annotated[str, typer.Option(help="headwater, or an arm or version: headwater/canary, headwater/v3.")] = (
        "headwater"
    ),
    user: Annotated[str, typer.Option(help="Who speaks; the node keeps a keyed hash.")] = "",
    key_file: Annotated[Path | None, typer.Option(help=f"Your API key; or set {KEY_VARIABLE}.")] = None,
    set_: Overrides = None,
) -> None:
    """Talk to the running node. Tools of `[agent]` in edge.toml run here, once, when the model calls them."""
    settings = edge_settings(config, set_)
    with asyncio.Runner() as runner:
        terminal = _Terminal(settings, url or _address(settings), model=model, user=user, key=_key(key_file))
        try:
            runner.run(terminal.open())
            while (line := terminal.ask()) is not None:
                try:
                    runner.run(terminal.take(line))
                except KeyboardInterrupt:
                    terminal.note("stopped; nothing of this turn is kept")
        finally:
            runner.run(terminal.close())


class _Terminal:
    """One conversation on a terminal."""

    def __init__(self, settings: EdgeConfig, url: str, *, model: str, user: str, key: str) -> None:
        self._settings = settings.agent
        self._url = url.rstrip("/")
        self._model = model
        self._user = user
        self._key = key
        self._out = Console(highlight=False, soft_wrap=True)
        self._opened = AsyncExitStack()
        self._agent: Agent | None = None
        self._conversation: list[Message] = []
        self._last: Turn | None = None

    async def open(self) -> None:
        from edge_node.agent.site_agent import site_tools

        self._tools = await self._opened.enter_async_context(site_tools(self._settings))
        self._start_over()
        names = ", ".join(d["function"]["name"] for d in self._tools.definitions)
        self.note(f"{self._url}, model {self._model}{', tools: ' + names if names else ''}; {_HELP}")

    async def close(self) -> None:
        await self._opened.aclose()

    def _start_over(self) -> None:
        """A conversation of its own, which stays on one arm."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        from edge_node.agent.site_agent import site_agent

        client = AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key=self._key or "none",
            default_headers={"x-headwater-conversation": uuid.uuid4().hex},
            max_retries=2,
            http_client=DefaultAsyncHttpxClient(trust_env=False),  # no proxy between two programs of one site
        )
        self._opened.push_async_callback(client.close)
        sampling = {"user": self._user} if self._user else {}
        self._agent = site_agent(self._settings, client, self._tools, model=self._model, sampling=sampling)
        self._conversation, self._last = [], None

    def ask(self) -> str | None:
        """The next line that is not empty; None at the end."""
        while True:
            try:
                line = self._out.input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                return None
            if line == "/quit":
                return None
            if line:
                return line

    async def take(self, line: str) -> None:
        if line in _THUMBS:
            await self._rate(_THUMBS[line])
        elif line == "/new":
            self._start_over()
            self.note("a new conversation")
        elif line.startswith("/"):
            self.note(_HELP)
        else:
            await self._turn(line)

    async def _turn(self, line: str) -> None:
        from edge_node.agent.loop import Finished, ModelUnavailable, TextDelta, ToolFinished, ToolStarted

        assert self._agent is not None
        asked = [*self._conversation, Message("user", line)]
        turn: Turn | None = None
        try:
            async with aclosing(self._agent.events(asked)) as events:
                async for event in events:
                    match event:
                        case TextDelta(text):
                            self._out.print(Text(printable(text)), end="")
                        case ToolStarted(call):
                            self.note(f"\n→ {call.name} {call.arguments}")
                        case ToolFinished(outcome):
                            self.note(f"← {outcome.call.name}: {outcome.result} ({outcome.duration_s:.2f} s)")
                        case Finished():
                            turn = event.turn
        except ModelUnavailable as error:
            self._out.print()
            self._conversation = [*asked, *error.turn.messages] if error.turn.messages else self._conversation
            self.note(f"{error}" if "no answer" not in str(error) else f"no node answers at {self._url}: {error}")
            return
        assert turn is not None
        self._out.print()
        self._conversation = [*asked, *turn.messages]
        self._last = turn
        served = " ".join(part for part in (turn.version, turn.arm) if part)
        self.note(f"[{served or 'version unknown'}]" + (f" {_ENDED[turn.ended]}" if turn.ended in _ENDED else ""))

    async def _rate(self, rating: float) -> None:
        if self._last is None:
            self.note("there is no answer to rate yet")
            return
        import httpx2

        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        body = {"msg_ids": list(self._last.response_ids), "rating": rating}
        try:
            async with httpx2.AsyncClient(headers=headers, timeout=10, trust_env=False) as http:
                response = await http.post(f"{self._url}/feedback", json=body)
            said = "rated" if response.status_code == 200 else response.json()["error"]["message"]
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            said = f"not rated: {type(error).__name__}"
        self.note(said)

    def note(self, text: str) -> None:
        """Something that nobody said."""
        short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
        self._out.print(Text(printable(short), style="dim"))


def printable(text: str) -> str:
    """Text without the control characters by which a model or a tool could take over a terminal."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def _address(settings: EdgeConfig) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - where to call
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _key(file: Path | None) -> str:
    from common.identity import read_private

    if file is None:
        return os.environ.get(KEY_VARIABLE, "")
    try:
        return read_private(file).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}") from error
