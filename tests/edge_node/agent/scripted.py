"""An OpenAI-compatible server on loopback that says what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


@dataclass(frozen=True)
class Says:
    """One answer: text, tool calls as (id, name, arguments), how it ends; `breaks` cuts the connection before the end."""

    text: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    finish_reason: str | None = None
    breaks: bool = False
    pause_s: float = 0.0


@dataclass(frozen=True)
class Refuses:
    status: int
    code: str = "invalid_value"
    message: str = "no"


@dataclass
class Script:
    answers: list[Says | Refuses] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def then(self, *answers: Says | Refuses) -> None:
        self.answers.extend(answers)

    def says(self, text: str) -> None:
        self.then(Says(text))

    def calls(self, *calls: tuple[str, str, str]) -> None:
        self.then(Says(calls=calls))


def _chunks(says: Says, number: int) -> Iterator[str]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        body = {"id": f"r{number}", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": choices}
        return f"data: {json.dumps(body)}\n\n"

    yield chunk({"role": "assistant", "content": ""})
    for start in range(0, len(says.text), 3):
        time.sleep(says.pause_s)
        yield chunk({"content": says.text[start : start + 3]})
    for index, (call_id, name, arguments) in enumerate(says.calls):
        function = {"name": name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
        for start in range(0, len(arguments), 7):
            part = {"index": index, "function": {"arguments": arguments[start : start + 7]}}
            yield chunk({"tool_calls": [part]})
    if says.breaks:
        return
    yield chunk({}, says.finish_reason or ("tool_calls" if says.calls else "stop"))
    yield "data: [DONE]\n\n"


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app on a free port of loopback, until the end of the block."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def scripted() -> Iterator[Script]:
    script, app = Script(), FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        script.requests.append(await request.json())
        answer = script.answers.pop(0)
        if isinstance(answer, Refuses):
            error = {"message": answer.message, "type": "invalid_request_error", "param": None, "code": answer.code}
            return JSONResponse({"error": error}, status_code=answer.status)
        headers = {"x-headwater-version": f"v{len(script.requests)}"}
        return StreamingResponse(_chunks(answer, len(script.requests)), media_type="text/event-stream", headers=headers)

    with serving(app) as url:
        script.url = f"{url}/v1"
        yield script
