"""The OpenAI-compatible HTTP face of an edge node.

Implements `/v1/chat/completions` without streaming or tools, `/v1/models`,
`/healthz` and `/readyz`. A parameter that is not implemented is refused by name:
ignoring it would answer another question than the agent asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from common.chat import Message
from common.inference.chat_tokenizer import ControlTokenInText
from common.inference.engine import GenerationFailed
from common.inference.sampling import SamplingParameters
from common.telemetry import log_event
from edge_node.serving.chat_service import ChatRequest, ChatService, Exchange, RequestTooLong
from edge_node.serving.router import Choice, Router

logger = logging.getLogger("headwater.edge")

MODEL_NAME = "headwater"
VERSION_HEADER = "x-headwater-version"
DIGEST_HEADER = "x-headwater-adapter-digest"
MAX_CHOICES = 16
SMALLEST_TEMPERATURE = 1e-3


def _encodable(text: str) -> str:
    """Refuse half of a surrogate pair: JSON can carry it, no text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text is not valid Unicode") from error
    return text


def _usable_temperature(temperature: float) -> float:
    if 0 < temperature < SMALLEST_TEMPERATURE:
        raise ValueError(f"use 0 for greedy, or at least {SMALLEST_TEMPERATURE}")
    return temperature


Text = Annotated[str, AfterValidator(_encodable)]


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    name: Text | None = None


class RequestMetadata(BaseModel):
    model_config = ConfigDict(extra="allow")

    task_id: Text = ""
    run_id: Text = ""


class ChatCompletionRequest(BaseModel):
    """The part of OpenAI's request that is implemented."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_usable_temperature)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**62), le=2**62)] | None = None
    user: Text | None = None
    logprobs: bool = False
    stream: Literal[False] = False
    metadata: RequestMetadata = RequestMetadata()


class Recorder(Protocol):
    """Takes every answered request; must not fail the request."""

    def record(self, exchange: Exchange) -> None: ...


def create_app(service: ChatService, router: Router, recorder: Recorder, *, provider: str) -> FastAPI:
    """The ASGI application of one node."""
    app = FastAPI(title="Headwater edge node", docs_url=None, redoc_url=None, openapi_url="/openapi.json")

    @app.post("/v1/chat/completions")
    async def chat_completions(
        body: ChatCompletionRequest, x_headwater_conversation: Annotated[str, Header()] = ""
    ) -> JSONResponse:
        request = _to_request(body, service, x_headwater_conversation)
        choice = _pinned(router, body.model, request)
        exchange = await service.answer(request, choice)
        await asyncio.to_thread(recorder.record, exchange)
        return JSONResponse(_completion(exchange, service, logprobs=body.logprobs), headers=_names(choice))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        arms = [MODEL_NAME, *(f"{MODEL_NAME}/{n}" for n in ("stable", "canary") if router.arm(n))]
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "site"} for name in arms]}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "provider": provider}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        return {"status": "ready", "version": router.arms.stable.id}

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "extra_forbidden":
            return _error(400, f"parameter {where} is not supported", where, "unsupported_parameter")
        if where == "stream":
            return _error(400, "streaming is not supported yet; leave stream out", where, "unsupported_parameter")
        return _error(400, f"{where or 'request body'}: {first['msg']}", where or None, "invalid_value")

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), None, "invalid_request")

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        log_event(logger, "request failed", error=type(error).__name__)
        return _error(500, "unexpected failure; see the node's log", None, "internal_error", kind="server_error")

    @app.exception_handler(UnknownModel)
    async def unknown_model(_: Request, error: UnknownModel) -> JSONResponse:
        return _error(404, str(error), "model", "model_not_found")

    @app.exception_handler(RequestTooLong)
    async def too_long(_: Request, error: RequestTooLong) -> JSONResponse:
        return _error(400, str(error), "messages", "context_length_exceeded")

    @app.exception_handler(ControlTokenInText)
    async def control_token(_: Request, error: ControlTokenInText) -> JSONResponse:
        return _error(400, str(error), "messages", "invalid_value")

    @app.exception_handler(GenerationFailed)
    async def failed(_: Request, error: GenerationFailed) -> JSONResponse:
        return _error(500, str(error), None, "generation_failed", kind="server_error")

    return app


class UnknownModel(LookupError):
    """The request names a model or arm that is not served."""


def _pinned(router: Router, model: str, request: ChatRequest) -> Choice:
    """`headwater` is routed; `headwater/stable` and `headwater/canary` name an arm."""
    if model == MODEL_NAME:
        return router.choose(request.conversation_id)
    prefix, _, arm = model.partition("/")
    choice = router.arm(arm) if prefix == MODEL_NAME else None
    if choice is None:
        raise UnknownModel(f"model {model!r} is not served here; see /v1/models")
    return choice


def _to_request(body: ChatCompletionRequest, service: ChatService, conversation: str) -> ChatRequest:
    first_user = next((m.content for m in body.messages if m.role == "user"), "")
    return ChatRequest(
        messages=[Message("system" if m.role == "developer" else m.role, m.content, m.name) for m in body.messages],
        sampling=SamplingParameters(body.temperature, body.top_p),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        choices=body.n,
        seed=body.seed,
        user=body.user,
        task_id=body.metadata.task_id,
        run_id=body.metadata.run_id,
        conversation_id=conversation or f"{body.user or ''}\n{first_user}",
    )


def _names(choice: Choice) -> dict[str, str]:
    return {VERSION_HEADER: choice.version.id, DIGEST_HEADER: choice.version.adapter.digest}


def _completion(exchange: Exchange, service: ChatService, *, logprobs: bool) -> dict[str, Any]:
    completion_tokens = sum(len(answer.generation.token_ids) for answer in exchange.answers)
    return {
        "id": exchange.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "system_fingerprint": exchange.choice.version.id,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "finish_reason": answer.generation.finish_reason,
                "logprobs": {"content": _token_logprobs(answer, service)} if logprobs else None,
            }
            for index, answer in enumerate(exchange.answers)
        ],
        "usage": {
            "prompt_tokens": len(exchange.prompt_ids),
            "completion_tokens": completion_tokens,
            "total_tokens": len(exchange.prompt_ids) + completion_tokens,
        },
    }


def _token_logprobs(answer: Any, service: ChatService) -> list[dict[str, Any]]:
    entries = []
    for token, logprob in zip(answer.generation.token_ids, answer.generation.logprobs, strict=True):
        text = service.tokenizer.decode([token])
        entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return entries


def _error(
    status: int, message: str, param: str | None, code: str, *, kind: str = "invalid_request_error"
) -> JSONResponse:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status_code=status)
