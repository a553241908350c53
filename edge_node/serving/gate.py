"""What every request passes before anything is done for it, in this order.

1. A node that is stopping takes nothing new (503).
2. Nobody without a key, where keys are set up (401).
3. Not more requests at once than one key may have (429); those of the site's agent belong to the turn they serve.
4. A body of JSON (415), not too large (413), and in time (408).

Whatever a request fails of after that, its client gets an error body, and the log gets
the class of the failure and never its text. Every request is counted and logged without
its content.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.telemetry import log_event
from edge_node.config import LimitSettings
from edge_node.serving.errors import ApiError, too_many, unavailable, unexpected
from edge_node.serving.keys import LOCAL, KeyRing, bearer_of
from edge_node.serving.metrics import Metrics

logger = logging.getLogger("headwater.requests")

HEALTH_PATHS = frozenset({"/healthz", "/readyz", "/health"})
INNER = "(agent)"
"""Who the agent's own requests are counted for; no key can have this name."""

_TURN = b"x-headwater-turn"
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_WEIGHT, _LONGEST_RETRY_S = 0.05, 30
_DRAINED_BYTES, _DRAINED_S = 64 * 2**20, 5.0


class Gate:
    """The outermost ASGI layer of a node.

    Args:
        keys: None where every caller is let in.
        open_paths: paths that need no key, beside those of health checks.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: LimitSettings,
        metrics: Metrics,
        keys: KeyRing | None,
        open_paths: Collection[str],
        state: GateState,
    ) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._keys = keys
        self._open = HEALTH_PATHS | frozenset(open_paths)
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 429:
                    MutableHeaders(scope=message)["retry-after"] = str(self._state.retry_after_s)
            await send(message)

        scope.setdefault("state", {})
        try:
            await self._admit(scope, receive, noting)
        except ApiError as error:
            await error.response()(scope, receive, noting)
        except Exception as error:  # outermost: the server would log the text
            if status == 0:
                await unexpected(error).response()(scope, receive, noting)
            else:
                log_event(logger, "response broke off", error=type(error).__name__)
        finally:
            self._note(scope, status, time.monotonic() - started)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        inner = self._state.is_inner(scope["headers"])
        if self._state.draining and not inner and path not in HEALTH_PATHS:  # (1)
            raise unavailable("this node is stopping")
        if path not in self._open:  # (2)
            caller = self._keys.caller(bearer_of(scope["headers"])) if self._keys is not None else LOCAL
            if caller is None:
                raise ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer hw-…",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            scope["state"]["caller"] = caller
        if scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        key = scope["state"]["caller"].id if "caller" in scope["state"] else ""
        if inner:  # (3) counted with the turn it belongs to
            key = INNER
        elif self._state.running[key] >= self._limits.requests_per_key:
            await _drain(receive)
            raise too_many(f"this key has {self._limits.requests_per_key} requests open already")
        self._state.running[key] += 1
        began = time.monotonic()
        try:
            body = await self._body(scope, receive)  # (4)
            await self._app(scope, _with_body(body, receive), send)
        finally:
            self._state.running[key] -= 1
            self._state.running += Counter()  # forget keys with none
            self._state.took(time.monotonic() - began)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, which is never held where it is larger than it may be."""
        limit = self._limits.body_bytes
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            await _drain(receive)
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the request broke off", code="incomplete_request")
                    more = message.get("more_body", False)
                    size += len(message.get("body", b""))
                    if size > limit:
                        break
                    parts.append(message.get("body", b""))
        except TimeoutError as error:
            close = {"connection": "close"}
            message_ = f"the request's body took longer than {self._limits.body_timeout_s:g} seconds"
            raise ApiError(408, message_, code="request_timeout", headers=close) from error
        if size > limit:
            parts.clear()
            if more:
                await _drain(receive)
            raise _too_large(limit)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if size and kind != b"application/json":
            raise ApiError(415, "send application/json", code="unsupported_media_type")
        return b"".join(parts)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.request_ended(route, status, seconds)
        state = scope["state"]
        fields: dict[str, str | int | float] = {"route": route, "status": status, "seconds": round(seconds, 6)}
        if "caller" in state:
            fields["key"] = state["caller"].id
        log_event(logger, "request", level=logging.INFO, **fields, **state.get("log", {}))


class GateState:
    """What the gate counts, and whether it is closing."""

    def __init__(self) -> None:
        self.draining = False
        self.running: Counter[str] = Counter()
        self.inner_headers = {_TURN.decode(): secrets.token_urlsafe(32)}
        self._mean_s = 0.0

    def is_inner(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request is part of one that was let in: the agent's own, which no other program can make."""
        said = next((value for name, value in headers if name == _TURN), b"")
        return hmac.compare_digest(said, self.inner_headers[_TURN.decode()].encode())

    def took(self, seconds: float) -> None:
        """Note how long a request was open."""
        self._mean_s += (seconds - self._mean_s) * _WEIGHT

    @property
    def retry_after_s(self) -> int:
        """About when those that are open now are done: as long as the last ones took."""
        return min(max(math.ceil(self._mean_s), 1), _LONGEST_RETRY_S)

    @property
    def open_requests(self) -> int:
        return self.running.total() - self.running[INNER]


def _too_large(limit: int) -> ApiError:
    close = {"connection": "close"}
    return ApiError(413, f"the request's body is larger than {limit} bytes", code="request_too_large", headers=close)


async def _drain(receive: Receive) -> None:
    """Read on without keeping anything, for a while: a client that still sends cannot read why it was refused."""
    size = 0
    try:
        async with asyncio.timeout(_DRAINED_S):
            while size < _DRAINED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _with_body(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then what else the server says: that the client has gone."""
    unread = True

    async def received() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return received
