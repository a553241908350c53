"""The `[agent]` part of edge.toml: the site's own agent, for `headwater edge chat` and the chat page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from common.config import Section
from edge_node.agent.tools import DEFAULT_RESULT_CHARACTERS, DEFAULT_TIMEOUT_S

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class McpSettings(Section):
    """One MCP server: `command`, a program with its arguments, or `url`.

    Attributes:
        environment: for the program, beside PATH, HOME and the like.
        key_file: sent to `url` as bearer; in a file that only the owner can read.
        prefix: put before the names of its tools.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    environment: dict[str, str] = Field(default_factory=dict)
    key_file: Path | None = None
    prefix: str = ""

    @field_validator("command", mode="before")
    @classmethod
    def _no_line_for_a_shell(cls, command: object) -> object:
        if isinstance(command, str):
            raise ValueError('write a list, ["program", "argument"]; there is no shell to take a line apart')
        return command


class AgentSettings(Section):
    """The site's agent.

    Attributes:
        system: its system turn.
        tools: import paths `package.module:function`.
        mcp: MCP servers by name.
        steps, seconds: a turn ends after as many answers of the model, or as much time.
        tool_seconds, result_characters: of one tool call.
        window_messages, window_tokens: what of a long conversation the model is shown; default: all that fits.
        temperature: of the model.
    """

    system: str = ""
    tools: tuple[str, ...] = ()
    mcp: dict[str, McpSettings] = Field(default_factory=dict)
    steps: Annotated[int, Field(ge=1, le=100)] = 8
    seconds: _Seconds = 120.0
    tool_seconds: _Seconds = DEFAULT_TIMEOUT_S
    result_characters: Annotated[int, Field(ge=100)] = DEFAULT_RESULT_CHARACTERS
    window_messages: Annotated[int, Field(ge=1)] | None = None
    window_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
