"""Every failure as an error body of the OpenAI API, with the status its clients expect."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from common.inference.batching import Overloaded
from common.inference.chat_tokenizer import MessagesRefused
from common.inference.constraints import InvalidSchema
from common.inference.engine import GenerationFailed
from common.telemetry import log_event
from edge_node.serving.exchange import RequestTooLong, Unservable

logger = logging.getLogger("headwater.edge")

INVALID_REQUEST, PERMISSION, RATE_LIMIT, SERVER = (
    "invalid_request_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
)
RETRY_AFTER_S = 1
_LONGEST_MESSAGE, _LONGEST_PARAM = 500, 200


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every failed request gets."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends here, with what its client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": _sendable(message)[:_LONGEST_MESSAGE],
                "type": kind,
                "param": None if param is None else _sendable(param)[:_LONGEST_PARAM],
                "code": code,
            }
        }
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)

    def event(self) -> bytes:
        """As the last event of a stream that breaks off."""
        return f"data: {json.dumps(self.body)}\n\n".encode()


def too_many(message: str) -> ApiError:
    """Ask again in a moment."""
    retry = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(429, message, code="rate_limit_exceeded", kind=RATE_LIMIT, headers=retry)


def unavailable(message: str) -> ApiError:
    """This node stops serving."""
    retry = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
    return ApiError(503, message, code="service_unavailable", kind=SERVER, headers=retry)


def unexpected(error: BaseException) -> ApiError:
    """Something nobody expected; its class goes to the log, its text nowhere."""
    log_event(logger, "request failed", error=type(error).__name__)
    return ApiError(500, "unexpected failure; see the node's log", code="internal_error", kind=SERVER)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about a failure to answer."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            return too_many(f"the node is busy: {error}")
        case RequestTooLong():
            return ApiError(400, str(error), param="messages", code="context_length_exceeded")
        case MessagesRefused():
            return ApiError(400, str(error), param="messages", code="invalid_value")
        case InvalidSchema():
            return ApiError(400, f"unusable schema: {error}", param="tools", code="invalid_json_schema")
        case Unservable():
            return ApiError(400, str(error), code="invalid_value")
        case GenerationFailed():
            return ApiError(500, str(error), code="generation_failed", kind=SERVER)
        case _:
            return unexpected(error)


REFUSALS = (Overloaded, RequestTooLong, MessagesRefused, InvalidSchema, Unservable)
"""What a request gets because of what it asks, or when; everything else is the node's failure."""


def is_refusal(error: Exception) -> bool:
    return isinstance(error, REFUSALS) or (isinstance(error, ApiError) and error.status < 500)


def install_errors(app: FastAPI) -> None:
    """Answer every failure inside the application in one form."""

    async def answered(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (ApiError, GenerationFailed, *REFUSALS):
        app.add_exception_handler(kind, answered)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _validation_error(error.errors()[0]).response()

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers).response()


def _validation_error(first: Mapping[str, Any]) -> ApiError:
    where = _parameter(first)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"parameter {where} is not supported", param=where, code="unsupported_parameter")
    return ApiError(400, f"{where or 'request body'}: {message}", param=where or None, code="invalid_value")


def _parameter(error: Mapping[str, Any]) -> str:
    """The parameter as its sender wrote it: without the branches of unions that pydantic puts between."""
    loc: Sequence[Any] = [part for part in error["loc"] if part != "body"]
    named = [
        str(part)
        for place, part in enumerate(loc)
        if not (place >= 2 and loc[place - 2] == "messages" and isinstance(loc[place - 1], int))
        and not (isinstance(part, str) and (part.startswith("literal[") or part == "NamedToolChoice"))
    ]
    if error["type"] == "json_invalid":
        return ""
    return ".".join([*named, "role"] if str(error["type"]).startswith("union_tag") else named)


def _sendable(text: str) -> str:
    """Half of a surrogate pair can come in as JSON and cannot go out as text."""
    return text.encode(errors="replace").decode()
