"""Chat messages and tool calls in the shapes of the OpenAI API."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


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

    def as_openai(self) -> dict[str, Any]:
        """This turn as a request of OpenAI's API carries it; reasoning stays here."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            fields["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return fields


CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
"""Around a call, `{"name": …, "arguments": {…}}`: the form the chat templates of current open models ask for."""

_CALL = re.compile(f"{CALL_OPENS}(.*?)(?:{CALL_CLOSES}|$)", re.DOTALL)


def parse_tool_call(body: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of what stands between the marks of a call; None where it cannot be made."""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not isinstance(call.get("arguments", {}), dict):
            return None
        name, arguments = call["name"], json.dumps(call.get("arguments", {}), ensure_ascii=False)
        f"{name}{arguments}".encode()  # half of a surrogate pair can be written in JSON and cannot be sent
    except (ValueError, RecursionError):
        return None
    return name, arguments


def has_invalid_tool_call(text: str) -> bool:
    """Whether generated text tries to call a tool and fails."""
    if any(parse_tool_call(body) is None for body in _CALL.findall(text)):
        return True
    return text.count(CALL_OPENS) != text.count(CALL_CLOSES)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
