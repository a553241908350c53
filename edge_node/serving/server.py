"""The process's HTTP server: patient with answers, not with clients, and in no hurry to stop.

On a first signal to stop, new requests are refused and running ones finish, up to a
deadline; a second one stops at once.
"""

from __future__ import annotations

import asyncio
import time
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from edge_node.config import LimitSettings
from edge_node.serving.errors import PERMISSION, ApiError
from edge_node.serving.gate import GateState
from edge_node.serving.keys import KeyRing

LARGEST_HEADERS = 65_536
_KEEP_ALIVE_S = 75
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class NodeServer(uvicorn.Server):
    """Serves one node's application.

    Args:
        keys: as long as there are none, only names of this machine are answered to, and no foreign web page.
    """

    def __init__(self, app: FastAPI, *, host: str, port: int, limits: LimitSettings, keys: KeyRing) -> None:
        super().__init__(
            uvicorn.Config(
                OnlyThisMachine(app, keys),
                host=host,
                port=port,
                http=_protocol(limits.header_timeout_s, limits.send_timeout_s),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._state: GateState = app.state.gate
        self._shutdown_s = limits.shutdown_s
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._state.draining:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._deadline = time.monotonic() + self._shutdown_s
        self._state.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._state.draining and (self._state.open_requests == 0 or time.monotonic() > self._deadline):
            self.should_exit = True
        return await super().on_tick(counter)


class OnlyThisMachine:
    """While no keys are set up: refuse other names for this host, and pages of other sites.

    A web page can make a browser on this machine send requests to a loopback port, under a name that its owner
    points there, or as a form; neither is a caller of this site.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._keys.in_use:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get(b"host", ""), headers.get(b"origin")
            if not _is_local(host) or (origin is not None and urlsplit(origin).netloc != host):
                refusal = ApiError(
                    403,
                    "without API keys this node answers only to localhost; make keys: headwater edge key add NAME",
                    code="not_local",
                    kind=PERMISSION,
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_local(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _LOCAL_NAMES
    except ValueError:
        return False


def _protocol(header_timeout_s: float, send_timeout_s: float) -> type[asyncio.Protocol]:
    """The server's protocol, with an end to waiting for a request's headers, to their size, and to a still reader."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
        waiting: asyncio.TimerHandle | None = None
        unsent: asyncio.TimerHandle | None = None
        unread_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
                return
            self.unread_bytes += len(data)
            if self.unread_bytes > LARGEST_HEADERS:
                self.transport.abort()
            elif self.waiting is None:
                self._wait()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.unsent = self.loop.call_later(send_timeout_s, self.transport.abort)  # close() would wait

        def resume_writing(self) -> None:
            self._was_read()
            super().resume_writing()

        def _was_read(self) -> None:
            if self.unsent is not None:
                self.unsent.cancel()
                self.unsent = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._was_read()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self.waiting = self.loop.call_later(header_timeout_s, self._give_up)

        def _stop_waiting(self) -> None:
            self.unread_bytes = 0
            if self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

        def _give_up(self) -> None:
            self.waiting = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Impatient
