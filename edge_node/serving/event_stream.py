"""Server-sent events: sent as they come, given up when their reader has gone or stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_node.serving.errors import as_api_error


class StandsStill(TimeoutError):
    """The reader takes nothing; nothing more is sent to it."""


class EventStream(Response):
    """A response of events; closing it closes `events`.

    Args:
        send_timeout_s: a reader that takes nothing for so long is left.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], *, headers: Mapping[str, str], send_timeout_s: float) -> None:
        super().__init__(headers={**headers, "cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unfinished = [task for task in (sending, leaving) if not task.done()]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            await self._events.aclose()
        if sending.done() and not sending.cancelled():
            sending.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await self._send(send, event, more=True)
        except StandsStill:
            raise
        except Exception as error:  # too late for a status: the stream says it, and has no end
            await self._send(send, as_api_error(error).event(), more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            raise StandsStill("the reader takes nothing") from error


async def client_left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
