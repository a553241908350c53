"""`/v1/completions`: plain text in, plain text out; the older of OpenAI's two shapes.

The prompt is the model's whole input, without a chat template, so these exchanges
are no conversations and are not recorded.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from edge_node.serving.completions import DONE, sampling_of, served_by, usage_of
from edge_node.serving.exchange import ChatRequest, Delta, Exchange, TokenLogprob
from edge_node.serving.router import Choice
from edge_node.serving.wire import CompletionRequest

DEFAULT_MAX_TOKENS = 16


def to_requests(body: CompletionRequest, *, conversation: str, key_id: str) -> list[ChatRequest]:
    """One request for each prompt; they share an id."""
    id_ = f"cmpl-{uuid.uuid4().hex}"
    return [
        ChatRequest(
            messages=(),
            prompt=prompt,
            sampling=sampling_of(body),
            max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
            choices=body.n,
            seed=body.seed,
            user=body.user,
            conversation_id=conversation or f"{body.user or ''}\n{prompt}",
            id=id_,
            stop=tuple(body.stop),
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
            key_id=key_id,
        )
        for prompt in body.prompt
    ]


def text_completion(exchanges: Sequence[Exchange], model: str) -> dict[str, Any]:
    """The body of a completion of one or more prompts, their choices one after the other."""
    answers = [(exchange.request, answer) for exchange in exchanges for answer in exchange.answers]
    return {
        **_head(exchanges[0].request, exchanges[0].choice, model),
        "headwater": served_by(exchanges[0].choice),
        "choices": [
            {
                "index": index,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(answer.logprobs, 0) if request.logprobs else None,
            }
            for index, (request, answer) in enumerate(answers)
        ],
        "usage": usage_of(
            sum(exchange.prompt_tokens for exchange in exchanges),
            sum(exchange.completion_tokens for exchange in exchanges),
        ),
    }


class TextChunkWriter:
    """The events of one streamed completion."""

    def __init__(self, request: ChatRequest, choice: Choice, model: str, *, include_usage: bool) -> None:
        self._head = _head(request, choice, model)
        self._choice = choice
        self._usage = include_usage
        self._written: dict[int, int] = {}

    def opening(self) -> bytes:
        return self._event([], headwater=served_by(self._choice))

    def delta(self, delta: Delta) -> bytes:
        if not (delta.content or delta.logprobs or delta.finish_reason):
            return b""
        offset = self._written.get(delta.index, 0)
        self._written[delta.index] = offset + len(delta.content)
        logprobs = _logprobs(delta.logprobs, offset) if delta.logprobs else None
        choice = {"index": delta.index, "text": delta.content, "finish_reason": delta.finish_reason}
        return self._event([{**choice, "logprobs": logprobs}])

    def ending(self, exchange: Exchange) -> bytes:
        if not self._usage:
            return DONE
        return self._event([], usage=usage_of(exchange.prompt_tokens, exchange.completion_tokens)) + DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._head, "choices": choices, **({"usage": None} if self._usage else {}), **more}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _head(request: ChatRequest, choice: Choice, model: str) -> dict[str, Any]:
    return {
        "id": request.id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": choice.version.id,
    }


def _logprobs(entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{likely.token: likely.logprob for likely in entry.top} for entry in entries],
        "text_offset": offsets,
    }
