"""Chat messages and tool calls in the shapes of the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolCall:
    """A function call an assistant asked for; `arguments` is JSON text as generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user, assistant or tool."""

    role: str
    content: str | None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
