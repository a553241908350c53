"""The OpenAI-compatible HTTP face of an edge node.

`/v1/chat/completions`, `/v1/completions` and `/v1/models`, with what operators need
beside them. A request is routed to a version once and keeps it; every response names
that version and the digest of its adapter.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response

from common.inference.batching import Load
from edge_node.config import LimitSettings
from edge_node.marking import HEADER as MARK_HEADER
from edge_node.marking import Mark, read_header
from edge_node.serving import completions, text_completions
from edge_node.serving.completions import DIGEST_HEADER as DIGEST_HEADER
from edge_node.serving.completions import VERSION_HEADER as VERSION_HEADER
from edge_node.serving.completions import ChunkWriter, version_headers
from edge_node.serving.errors import ApiError, ErrorBody, install_errors, is_refusal
from edge_node.serving.event_stream import EventStream, client_left
from edge_node.serving.exchange import Chat, ChatRequest, Exchange
from edge_node.serving.gate import Gate, GateState
from edge_node.serving.keys import CHAT, METRICS, Caller, KeyRing, require
from edge_node.serving.metrics import CONTENT_TYPE, Metrics, wants_json
from edge_node.serving.probe import Probe, ProbeReport
from edge_node.serving.response_ids import ResponseIds
from edge_node.serving.router import Choice, Router
from edge_node.serving.text_completions import TextChunkWriter, text_completion
from edge_node.serving.wire import ChatCompletionRequest, CompletionRequest

MODEL_NAME = "headwater"

Result = TypeVar("Result")
_EITHER = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": _EITHER, "description": "The answer, or its events with `stream: true`."}
}
_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request was refused."},
    "5XX": {"model": ErrorBody, "description": "The node could not answer."},
}


class Recorder(Protocol):
    """Takes every answered request; must not fail the request."""

    def record(self, exchange: Exchange) -> None: ...


def create_app(
    chat: Chat,
    router: Router,
    recorder: Recorder,
    *,
    provider: str,
    precision: str = "float32",
    limits: LimitSettings | None = None,
    keys: KeyRing | None = None,
    ids: ResponseIds | None = None,
    load: Callable[[], Load] | None = None,
    probe: Probe | None = None,
    routers: Sequence[APIRouter] = (),
    open_paths: Collection[str] = (),
) -> FastAPI:
    """The ASGI application of one node.

    Args:
        provider, precision: what generates, and in which numbers; shown by `/healthz`.
        keys: None where every caller is let in, as in a simulation.
        ids: of the responses; None where nobody asks for them again.
        load: requests waiting and running, for the metrics.
        probe: compares what is served with what was published.
        routers: further routes, for which the same gate, keys and errors hold.
        open_paths: those of their paths that need no key.
    """
    limits = limits or LimitSettings()
    app = FastAPI(title="Headwater edge node", docs_url=None, redoc_url=None, responses=_FAILURES)
    app.state.gate = state = GateState()
    app.state.metrics = metrics = Metrics(router, load=load, matches=lambda: _matches(probe))
    install_errors(app)
    serving = _Serving(chat, router, recorder, metrics, limits, ids or ResponseIds(secrets.token_bytes(32)))
    app.include_router(_completions(serving))
    app.include_router(_models(router))
    app.include_router(_operations(router, metrics, state, probe, provider=provider, precision=precision))
    for more in routers:
        app.include_router(more)
    app.add_middleware(Gate, limits=limits, metrics=metrics, keys=keys, open_paths=open_paths, state=state)
    return app


class _Serving:
    """Routes, answers, records and counts."""

    def __init__(
        self,
        chat: Chat,
        router: Router,
        recorder: Recorder,
        metrics: Metrics,
        limits: LimitSettings,
        ids: ResponseIds,
    ) -> None:
        self.chat = chat
        self.router = router
        self.recorder = recorder
        self.metrics = metrics
        self.ids = ids
        self.limits = limits

    def route(self, model: str, conversation: str) -> Choice:
        """`headwater` is routed; `headwater/stable`, `headwater/v3` name an arm or a version."""
        if model == MODEL_NAME:
            return self.router.choose(conversation)
        prefix, _, name = model.partition("/")
        choice = (self.router.arm(name) or self.router.pinned(name)) if prefix == MODEL_NAME else None
        if choice is None:
            raise ApiError(
                404, f"model {model!r} is not served here; see /v1/models", param="model", code="model_not_found"
            )
        return choice

    def check(self, request: ChatRequest) -> None:
        """Refuse more than this site's limits allow."""
        most = self.limits.max_tokens
        if most is not None and (request.max_tokens or 0) > most:
            raise ApiError(400, f"max_tokens may be at most {most} here", param="max_tokens", code="invalid_value")
        if request.choices > self.limits.choices:
            raise ApiError(400, f"n may be at most {self.limits.choices} here", param="n", code="invalid_value")

    async def answer(self, http: Request, request: ChatRequest, choice: Choice) -> Exchange:
        """The whole answer, recorded; generation ends when the client leaves."""
        started = time.monotonic()
        try:
            exchange = await _while_connected(http, self.chat.answer(request, choice))
        except ClientLeft:
            self.metrics.not_answered(choice, "left")
            raise
        except Exception as error:
            self._failed(choice, error)
            raise
        await self._record(http, exchange, started)
        return exchange

    async def events(
        self, http: Request, request: ChatRequest, choice: Choice, writer: ChunkWriter | TextChunkWriter
    ) -> AsyncGenerator[bytes]:
        """The events of a streamed answer, recorded before its end is sent.

        The first event, an empty one, comes when there is something to say, so that a request that
        cannot be answered still gets its status.
        """
        started = time.monotonic()
        items = self.chat.stream(request, choice)
        whole = False
        try:
            first = await _while_connected(http, anext(items))
            yield b""
            yield writer.opening()
            item = first
            while not isinstance(item, Exchange):
                event = writer.delta(item)
                if event:
                    yield event
                item = await anext(items)
            await self._record(http, item, started)
            whole = True
            yield writer.ending(item)
        except ClientLeft:
            raise
        except Exception as error:
            whole = True
            self._failed(choice, error)
            raise
        finally:
            if not whole:
                self.metrics.not_answered(choice, "left")
            await _close(items)

    async def stream(
        self, http: Request, request: ChatRequest, choice: Choice, writer: ChunkWriter | TextChunkWriter
    ) -> Response:
        events = self.events(http, request, choice, writer)
        await anext(events)  # what cannot be answered fails here, with a status
        return EventStream(events, headers=version_headers(choice), send_timeout_s=self.limits.send_timeout_s)

    async def _record(self, http: Request, exchange: Exchange, started: float) -> None:
        self.metrics.answered(exchange, time.monotonic() - started)
        http.state.log = {
            "arm": exchange.choice.arm,
            "version": exchange.choice.version.id,
            "prompt_tokens": exchange.prompt_tokens,
            "completion_tokens": exchange.completion_tokens,
        }
        if exchange.request.prompt is None:
            await asyncio.to_thread(self.recorder.record, exchange)

    def _failed(self, choice: Choice, error: Exception) -> None:
        self.metrics.not_answered(choice, "refused" if is_refusal(error) else "error")


class ClientLeft(ApiError):
    """Nobody is there to be answered; the status is for the log."""

    def __init__(self) -> None:
        super().__init__(499, "the client has gone", code="client_left")


async def _while_connected(http: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(client_left(http.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        unfinished = [task for task in (working, leaving) if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


async def _close(items: Any) -> None:
    """End a generator early; an iterator that is none has nothing to end."""
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()


def _completions(serving: _Serving) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=_ANSWER)
    async def chat_completions(
        http: Request,
        body: ChatCompletionRequest,
        caller: Annotated[Caller, Depends(require(CHAT))],
        x_headwater_conversation: Annotated[str, Header(max_length=512)] = "",
    ) -> Response:
        request = completions.to_chat_request(
            body,
            id=serving.ids.new(caller.id),
            conversation=x_headwater_conversation,
            key_id=caller.id,
            mark=_mark(http),
        )
        serving.check(request)
        choice = serving.route(body.model, request.conversation_id)
        if body.stream:
            writer = ChunkWriter(request, choice, body.model, include_usage=body.include_usage)
            return await serving.stream(http, request, choice, writer)
        exchange = await serving.answer(http, request, choice)
        return JSONResponse(completions.chat_completion(exchange, body.model), headers=version_headers(choice))

    @routes.post("/v1/completions", responses=_ANSWER)
    async def text_completions_(
        http: Request,
        body: CompletionRequest,
        caller: Annotated[Caller, Depends(require(CHAT))],
        x_headwater_conversation: Annotated[str, Header(max_length=512)] = "",
    ) -> Response:
        requests = text_completions.to_requests(body, conversation=x_headwater_conversation, key_id=caller.id)
        for request in requests:
            serving.check(request)
        choice = serving.route(body.model, requests[0].conversation_id)
        if body.stream:
            if len(requests) > 1:
                raise ApiError(400, "several prompts cannot be streamed", param="stream", code="invalid_value")
            writer = TextChunkWriter(requests[0], choice, body.model, include_usage=body.include_usage)
            return await serving.stream(http, requests[0], choice, writer)
        exchanges = [await serving.answer(http, request, choice) for request in requests]
        return JSONResponse(text_completion(exchanges, body.model), headers=version_headers(choice))

    return routes


def _mark(http: Request) -> Mark | None:
    value = http.headers.get(MARK_HEADER)
    if value is None:
        return None
    try:
        return read_header(value)
    except ValueError as error:
        raise ApiError(400, f"{MARK_HEADER}: {error}", param=MARK_HEADER, code="invalid_value") from error


def _models(router: Router) -> APIRouter:
    routes = APIRouter(dependencies=[Depends(require(CHAT))])

    def served() -> dict[str, dict[str, Any]]:
        arms = router.arms
        named = {MODEL_NAME: arms.stable, **{f"{MODEL_NAME}/{name}": v for name, v in arms.named.items()}}
        named |= {f"{MODEL_NAME}/{v.id}": v for v in router.versions if f"{MODEL_NAME}/{v.id}" not in named}
        return {
            name: {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "site",
                "headwater": {"version": version.id, "adapter_digest": version.adapter.digest},
            }
            for name, version in named.items()
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(served().values())}

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        found = served().get(model)
        if found is None:
            raise ApiError(404, "this model is not served here; see /v1/models", param="model", code="model_not_found")
        return found

    return routes


def _operations(
    router: Router, metrics: Metrics, state: GateState, probe: Probe | None, *, provider: str, precision: str
) -> APIRouter:
    routes = APIRouter()

    probing = asyncio.Lock()  # who waits for a probe holds no thread

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "provider": provider, "precision": precision}

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        stable = router.arms.stable
        found = probe.reports if probe is not None else {}
        ready = not state.draining and (stable.id not in found or found[stable.id].matches)
        body: dict[str, Any] = {
            "status": "ready" if ready else "stopping" if state.draining else "not what was published",
            "version": stable.id,
            "adapter_digest": stable.adapter.digest,
            "served_as_published": {
                arm: found[v.id].matches if v.id in found else None for arm, v in router.arms.named.items()
            },
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    @routes.get(
        "/metrics",
        dependencies=[Depends(require(METRICS))],
        responses={200: {"content": {"text/plain": {}, "application/json": {}}}},
    )
    async def metrics_(http: Request) -> Response:
        if wants_json(http.headers.get("accept", "*/*")):
            return JSONResponse(metrics.samples(), headers={"vary": "accept"})
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE, "vary": "accept"})

    @routes.post("/probe", dependencies=[Depends(require(METRICS))])
    async def probe_() -> JSONResponse:
        if probe is None:
            raise ApiError(404, "this node has nothing to probe", code="not_found")
        async with probing:
            found = await asyncio.to_thread(probe.run)
        return JSONResponse({"reports": [_shown(report) for report in found]})

    return routes


def _shown(report: ProbeReport) -> dict[str, Any]:
    difference = report.largest_difference
    return {**report.shown(), "largest_difference": difference if difference == difference else None}  # NaN: none


def _matches(probe: Probe | None) -> dict[str, bool]:
    return {} if probe is None else {version: report.matches for version, report in probe.reports.items()}
