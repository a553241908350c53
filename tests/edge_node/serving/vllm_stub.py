"""A server that behaves like vLLM's, on the embedded model and our engine.

Made after vLLM's own source of early 2026, with `load_inplace` in it (vllm-project/vllm:
`entrypoints/openai/models/serving.py` at commit 4fe4500, `chat_completion/protocol.py` at d5dba2d): paths, fields,
error bodies and status codes, what `return_token_ids` adds; adapters are read from a folder when they are loaded and are
gone after a restart. It generates for real, so that an adapter that is not applied is noticed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from common.adapter import Adapter, LoraShape, parse_tensors
from common.chat import Message, ToolCall
from common.inference.batching import Batcher
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Grammars
from common.inference.engine import Engine, LoadedAdapter
from common.inference.sampling import SamplingParameters
from edge_node.serving.chat_service import ChatService
from edge_node.serving.exchange import (
    Answer,
    ChatRequest,
    Exchange,
    RequestTooLong,
    ResponseFormat,
    TokenLogprob,
    ToolChoice,
)
from edge_node.serving.router import Choice, ServedVersion

BASE, KEY = "embedded-base", "vllm-secret-key"


@dataclass
class Vllm:
    """The server's state; tests look at it and break it.

    Attributes:
        loras: name to (folder, loaded weights).
        calls: paths asked, in order, with their bodies.
        failing: status codes to answer the next requests for answers with, in order; 0 breaks the connection off.
        ignores_adapters: answer with the base model whatever the name says.
    """

    service: ChatService
    base: LoadedAdapter
    key: str = KEY
    lora_updating: bool = True
    max_lora_rank: int = 16
    token_ids: bool = True
    loras: dict[str, tuple[str, LoadedAdapter]] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failing: list[int] = field(default_factory=list)
    ignores_adapters: bool = False
    cut_after: int | None = None  # events of a stream

    def restart(self) -> None:
        self.loras.clear()

    def reset(self) -> None:
        """As it was when it started."""
        self.__dict__.update(Vllm(self.service, self.base).__dict__)

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [body for name, body in self.calls if name == path]


def vllm(engine: Engine, tokenizer: ChatTokenizer, start: Adapter) -> tuple[Vllm, FastAPI]:
    service = ChatService(tokenizer, Batcher(engine), Grammars(engine.model, tokenizer))
    state = Vllm(service, engine.load(start))
    app = FastAPI()

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Any) -> Response:
        if state.key and request.headers.get("authorization") != f"Bearer {state.key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return await call_next(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        cards = [{"id": BASE, "object": "model", "owned_by": "vllm", "root": f"/models/{BASE}", "parent": None}]
        for name, (path, _) in state.loras.items():
            cards.append({"id": name, "object": "model", "owned_by": "vllm", "root": path, "parent": BASE})
        return {"object": "list", "data": cards}

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await request.json()
        state.calls.append(("load", body))
        if not state.lora_updating:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            return _error(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in state.loras:
            return _error(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
                "InvalidUserInput",
            )
        folder = Path(path)
        if not (folder / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > state.max_lora_rank:
            said = f"LoRA rank {config['r']} is greater than max_lora_rank {state.max_lora_rank}."
            return _error(400, said, "BadRequestError")
        shape = LoraShape(config["r"], config["lora_alpha"], tuple(config["target_modules"]))
        tensors = parse_tensors((folder / "adapter_model.safetensors").read_bytes())
        state.loras[name] = (path, engine.load(Adapter(shape, tensors)))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        body = await request.json()
        state.calls.append(("unload", body))
        if body["lora_name"] not in state.loras:
            return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.", "NotFoundError")
        del state.loras[body["lora_name"]]
        return PlainTextResponse(f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")

    async def answered(request: Request, kind: str) -> Response:
        body = await request.json()
        state.calls.append((kind, body))
        if state.failing:
            status = state.failing.pop(0)
            if status:
                return _error(status, f"failed at http://vllm.internal with {state.key}", "InternalServerError")
            return StreamingResponse(_broken(), media_type="application/json")
        name = body["model"]
        if name != BASE and name not in state.loras:
            return _error(404, f"The model `{name}` does not exist.", "NotFoundError", param="model")
        adapter = state.base if name == BASE or state.ignores_adapters else state.loras[name][1]
        try:
            asked = _request(body)
            exchange = await state.service.answer(asked, Choice("stable", ServedVersion(name, adapter)))
        except RequestTooLong:
            said = "This model's maximum context length is 96 tokens. However, you requested more."
            return _error(400, said, "BadRequestError")
        if kind == "completions":
            return JSONResponse(_plain(exchange, name, state))
        if not body.get("stream"):
            return JSONResponse(_whole(exchange, name, state, body))
        return StreamingResponse(_stream(exchange, name, state, body), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answered(request, "chat")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered(request, "completions")

    return state, app


def _error(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}, status_code=status
    )


async def _broken() -> AsyncIterator[bytes]:
    yield b'{"id": "chatcmpl-1", "cho'
    raise ConnectionError


def _request(body: dict[str, Any]) -> ChatRequest:
    messages = [
        Message(
            m["role"],
            m.get("content"),
            m.get("name"),
            m.get("tool_call_id"),
            tuple(
                ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls") or ()
            ),
        )
        for m in body.get("messages", ())
    ]
    wish = body.get("tool_choice", "auto" if body.get("tools") else "none")
    form = body.get("response_format")
    bias = tuple((int(token), value) for token, value in (body.get("logit_bias") or {}).items())
    return ChatRequest(
        messages,
        SamplingParameters(body["temperature"], body.get("top_p", 1.0), body.get("top_k", 0), bias),
        body.get("max_tokens"),
        choices=body.get("n", 1),
        seed=body.get("seed"),
        prompt=body.get("prompt"),
        tools=tuple(body.get("tools") or ()),
        tool_choice=ToolChoice("required", wish["function"]["name"]) if isinstance(wish, dict) else ToolChoice(wish),
        response_format=None if form is None else ResponseFormat(form.get("json_schema", {}).get("schema")),
        stop=tuple(body.get("stop") or ()),
        logprobs=bool(body.get("logprobs")),
        top_logprobs=body.get("top_logprobs") or 0,
    )


def _logprobs(entries: tuple[TokenLogprob, ...], wanted: bool) -> dict[str, Any] | None:
    def entry(e: TokenLogprob) -> dict[str, Any]:
        return {"token": e.token, "logprob": e.logprob, "bytes": list(e.bytes or e.token.encode())}

    return {"content": [{**entry(e), "top_logprobs": [entry(t) for t in e.top]} for e in entries]} if wanted else None


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": f"chatcmpl-tool-{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": c.name, "arguments": c.arguments},
        }
        for c in answer.message.tool_calls
    ]


def _usage(exchange: Exchange) -> dict[str, int]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(exchange: Exchange, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": 1, "model": model}


def _whole(exchange: Exchange, model: str, state: Vllm, body: dict[str, Any]) -> dict[str, Any]:
    tokens = state.token_ids and body.get("return_token_ids")
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": answer.message.content,
                "refusal": None,
                "tool_calls": _calls(answer),
                "reasoning": answer.message.reasoning,
            },
            "logprobs": _logprobs(answer.logprobs, bool(body.get("logprobs"))),
            "finish_reason": answer.finish_reason,
            "stop_reason": None,
            "token_ids": answer.generation.token_ids if tokens else None,
        }
        for index, answer in enumerate(exchange.answers)
    ]
    return {
        **_head(exchange, model, "chat.completion"),
        "choices": choices,
        "usage": _usage(exchange),
        "prompt_logprobs": None,
        "prompt_token_ids": exchange.prompt_ids if tokens else None,
        "kv_transfer_params": None,
    }


def _plain(exchange: Exchange, model: str, state: Vllm) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(exchange.answers):
        logprobs = None
        if answer.logprobs:
            logprobs = {
                "tokens": [e.token for e in answer.logprobs],
                "token_logprobs": [e.logprob for e in answer.logprobs],
                "top_logprobs": [{t.token: t.logprob for t in e.top} for e in answer.logprobs],
                "text_offset": [0] * len(answer.logprobs),
            }
        choices.append(
            {
                "index": index,
                "text": answer.text,
                "logprobs": logprobs,
                "finish_reason": answer.finish_reason,
                "token_ids": answer.generation.token_ids if state.token_ids else None,
                "prompt_token_ids": exchange.prompt_ids if state.token_ids else None,
            }
        )
    return {**_head(exchange, model, "text_completion"), "choices": choices, "usage": _usage(exchange)}


async def _stream(exchange: Exchange, model: str, state: Vllm, body: dict[str, Any]) -> AsyncIterator[str]:
    """As vLLM: a first chunk with the role and the prompt's ids, tokens a few at a time, a call in pieces."""
    tokens = state.token_ids and body.get("return_token_ids")
    head = _head(exchange, model, "chat.completion.chunk")
    events: list[dict[str, Any]] = []

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> None:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        events.append({**head, "choices": [choice]})

    for index, answer in enumerate(exchange.answers):
        chunk(index, {"role": "assistant", "content": ""})
        if index == 0 and tokens:
            events[-1]["prompt_token_ids"] = exchange.prompt_ids
        ids, entries = answer.generation.token_ids, answer.logprobs
        text = answer.message.content or ""
        size = max(1, -(-len(text) // max(1, len(ids))))
        for at, token_id in enumerate(ids):
            part = text[at * size : (at + 1) * size] if at < len(ids) - 1 else text[at * size :]
            logprobs = _logprobs(entries[at : at + 1], True) if at < len(entries) and body.get("logprobs") else None
            chunk(index, {"content": part}, logprobs=logprobs, **({"token_ids": [token_id]} if tokens else {}))
        for place, call in enumerate(_calls(answer)):
            function = call["function"]
            first = {"index": place, "id": call["id"], "type": "function", "function": {"name": function["name"]}}
            chunk(index, {"tool_calls": [first]})
            for start in range(0, len(function["arguments"]), 5):
                piece = {"index": place, "function": {"arguments": function["arguments"][start : start + 5]}}
                chunk(index, {"tool_calls": [piece]})
        chunk(index, {}, finish_reason=answer.finish_reason, stop_reason=None)
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": _usage(exchange)})
    for number, event in enumerate(events):
        if number == state.cut_after:
            return
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"
