"""Between the wire and an exchange: requests in, response bodies and stream events out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common.chat import Message, ToolCall
from common.inference.sampling import SamplingParameters
from edge_node.marking import METADATA_KEY, Mark, read_metadata
from edge_node.serving.errors import ApiError
from edge_node.serving.exchange import (
    ChatRequest,
    Delta,
    Exchange,
    ResponseFormat,
    TokenLogprob,
    ToolChoice,
)
from edge_node.serving.router import Choice
from edge_node.serving.wire import (
    AssistantMessage,
    ChatCompletionRequest,
    ChatMessage,
    NamedToolChoice,
    ResponseFormatField,
    ToolMessage,
)

VERSION_HEADER = "x-headwater-version"
DIGEST_HEADER = "x-headwater-adapter-digest"
DONE = b"data: [DONE]\n\n"


def to_chat_request(
    body: ChatCompletionRequest, *, id: str, conversation: str, key_id: str, mark: Mark | None
) -> ChatRequest:
    """What a chat completion asks for.

    Args:
        id: of the response.
        conversation: what the caller calls it; else the user and the first thing they said stand for it.
        mark: from the request's header; else the metadata may hold one.
    Raises:
        ApiError: the metadata holds an unusable mark.
    """
    first = next((m.content for m in body.messages if m.role == "user"), "")
    try:
        mark = mark or read_metadata(body.metadata)
    except ValueError as error:
        raise ApiError(400, str(error), param=f"metadata.{METADATA_KEY}", code="invalid_value") from error
    return ChatRequest(
        messages=[to_message(message) for message in body.messages],
        sampling=sampling_of(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        choices=body.n,
        seed=body.seed,
        user=body.user,
        task_id=body.metadata.get("task_id", "") or (mark.task_id if mark else ""),
        run_id=body.metadata.get("run_id", "") or (mark.run_id if mark else ""),
        conversation_id=conversation or f"{body.user or ''}\n{first}",
        tools=tuple(tool.model_dump(exclude_none=True) for tool in body.tools or ()),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.response_format),
        stop=tuple(body.stop),
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        id=id,
        key_id=key_id,
        marking=mark,
        metadata=dict(body.metadata),
    )


def sampling_of(body: Any) -> SamplingParameters:
    bias = tuple((int(token), value) for token, value in body.logit_bias.items())
    return SamplingParameters(body.temperature, body.top_p, body.top_k, bias)


def to_message(message: ChatMessage) -> Message:
    """A turn as it arrived."""
    role = "system" if message.role == "developer" else message.role
    if isinstance(message, AssistantMessage):
        calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ())
        return Message(role, message.content, message.name, tool_calls=calls, reasoning=message.reasoning_content)
    if isinstance(message, ToolMessage):
        return Message(role, message.content, message.name, message.tool_call_id)
    return Message(role, message.content, message.name)


def _tool_choice(wish: str | NamedToolChoice | None) -> ToolChoice:
    if isinstance(wish, NamedToolChoice):
        return ToolChoice("required", wish.function.name)
    return ToolChoice() if wish is None else ToolChoice(wish)  # type: ignore[arg-type]


def _response_format(wish: ResponseFormatField | None) -> ResponseFormat | None:
    if wish is None or wish.type == "text":
        return None
    if wish.json_schema is None:
        return ResponseFormat()
    return ResponseFormat(wish.json_schema.schema_, bool(wish.json_schema.strict))


def version_headers(choice: Choice) -> dict[str, str]:
    return {VERSION_HEADER: choice.version.id, DIGEST_HEADER: choice.version.adapter.digest}


def served_by(choice: Choice) -> dict[str, str]:
    return {"version": choice.version.id, "adapter_digest": choice.version.adapter.digest, "arm": choice.arm}


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chat_completion(exchange: Exchange, model: str) -> dict[str, Any]:
    """The body of a chat completion."""
    return {
        "id": exchange.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": exchange.choice.version.id,
        "headwater": served_by(exchange.choice),
        "choices": [
            {
                "index": index,
                "message": _assistant(answer.message),
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(answer.logprobs) if exchange.request.logprobs else None,
            }
            for index, answer in enumerate(exchange.answers)
        ],
        "usage": usage_of(exchange.prompt_tokens, exchange.completion_tokens),
    }


def _assistant(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [_call(call) for call in message.tool_calls]
    return body


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    def named(entry: TokenLogprob) -> dict[str, Any]:
        bytes_ = None if entry.bytes is None else list(entry.bytes)
        return {"token": entry.token, "logprob": entry.logprob, "bytes": bytes_}

    return {"content": [{**named(e), "top_logprobs": [named(t) for t in e.top]} for e in entries], "refusal": None}


class ChunkWriter:
    """The events of one streamed chat completion.

    Args:
        include_usage: send the usage in an event of its own before the end, and `usage: null` before it.
    """

    def __init__(self, request: ChatRequest, choice: Choice, model: str, *, include_usage: bool) -> None:
        self._request = request
        self._choice = choice
        self._usage = include_usage
        self._calls: dict[int, int] = {}
        self._fixed = {
            "id": request.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": choice.version.id,
        }

    def opening(self) -> bytes:
        """Whose turn it is, and which version speaks."""
        roles = [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
            for index in range(self._request.choices)
        ]
        return b"".join(self._event([role], headwater=served_by(self._choice)) for role in roles)

    def delta(self, delta: Delta) -> bytes:
        """One delta; empty where it says nothing."""
        said: dict[str, Any] = {}
        if delta.content:
            said["content"] = delta.content
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = [{"index": self._next_call(delta.index), **_call(call)} for call in delta.tool_calls]
        logprobs = _logprobs(delta.logprobs) if delta.logprobs else None
        events = []
        if said or logprobs:
            events.append(self._event([self._part(delta.index, said, None, logprobs)]))
        if delta.finish_reason is not None:
            events.append(self._event([self._part(delta.index, {}, delta.finish_reason, None)]))
        return b"".join(events)

    def ending(self, exchange: Exchange) -> bytes:
        """The usage where it was asked for, and the end."""
        if not self._usage:
            return DONE
        usage = usage_of(exchange.prompt_tokens, exchange.completion_tokens)
        return self._event([], usage=usage, headwater=served_by(self._choice)) + DONE

    def _next_call(self, index: int) -> int:
        number = self._calls.get(index, 0)
        self._calls[index] = number + 1
        return number

    @staticmethod
    def _part(index: int, said: Mapping[str, Any], finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "delta": said, "finish_reason": finish_reason, "logprobs": logprobs}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._fixed, "choices": choices, **({"usage": None} if self._usage else {}), **more}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
