"""Chat messages and tool calls in the shapes of the OpenAI API."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolCall:
    """A function call an assistant asked for; `arguments` is JSON text as generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user, assistant or tool; `reasoning` is what an assistant thought before it spoke."""

    role: str
    content: str | None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def has_invalid_tool_call(text: str) -> bool:
    """Whether generated text tries to call a tool and fails.

    A call is written `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the form
    the chat templates of current open models ask for.
    """
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return True
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return True
        if not isinstance(call.get("arguments", {}), dict):
            return True
    return text.count("<tool_call>") != text.count("</tool_call>")
