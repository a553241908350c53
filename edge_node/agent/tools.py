"""Tools an agent may call: a name, a JSON schema, and a function that runs once per call.

A call never raises: a tool that fails, is unknown, runs too long or gets arguments
that do not fit gives an observation, a text for the model. What a call returned and
how long it took is kept with it, for the record of the conversation.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_json

from common.chat import ToolCall
from common.errors import ConfigError

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What OpenAI's API allows as a tool's name."""

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_RESULT_CHARACTERS = 8_000
_SHOWN_PROBLEMS = 5


class InvalidArguments(ValueError):
    """The arguments of a call do not fit the tool's schema; the message is for the model."""


class ToolFailed(RuntimeError):
    """A tool says that it failed; the message is for the model."""


@dataclass(frozen=True)
class Tool:
    """One tool.

    Attributes:
        parameters: JSON schema of the arguments, an object.
        run: takes the arguments as JSON text, returns the result as text; raises InvalidArguments before
            anything was done, or any other error.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[str], Awaitable[str]]
    timeout_s: float = DEFAULT_TIMEOUT_S
    result_characters: int = DEFAULT_RESULT_CHARACTERS

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"tool name {self.name!r} must have 1 to 64 letters, digits, hyphens or underscores")

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the shape of OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolOutcome:
    """One call that was answered: `result` is what the model reads, `status` is `ok` or the kind of failure."""

    call: ToolCall
    result: str
    status: str
    duration_s: float


class Toolbox:
    """Tools by name.

    Raises:
        ConfigError: two tools have one name.
    """

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(f"two tools are called {tool.name!r}; rename one, or give its server a prefix")
            self._tools[tool.name] = tool

    @property
    def definitions(self) -> list[dict[str, Any]]:
        return [tool.definition for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolOutcome:
        """Run one call, once; only cancellation by the caller leaves this function as an exception."""
        started = time.monotonic()

        def outcome(result: str, status: str) -> ToolOutcome:
            return ToolOutcome(call, _sendable(result), status, time.monotonic() - started)

        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return outcome(f"error: there is no tool {call.name[:64]!r}; tools: {known}", "unknown-tool")
        try:
            async with asyncio.timeout(tool.timeout_s) as limit:
                result = await tool.run(call.arguments)
        except InvalidArguments as error:
            return outcome(f"error: {shortened(str(error), tool.result_characters)}", "invalid-arguments")
        except TimeoutError:
            if limit.expired():
                return outcome(
                    f"error: {call.name} took longer than {tool.timeout_s:g} s; it may still be running", "timeout"
                )
            return outcome("error: TimeoutError", "failed")
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return outcome(f"error: {call.name} was cancelled", "failed")  # by itself, not by our caller
        except (Exception, SystemExit) as error:  # outermost: tools are other people's code
            return outcome(f"error: {shortened(_told(error), tool.result_characters)}", "failed")
        return outcome(shortened(result, tool.result_characters), "ok")


def load_tool(
    path: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, result_characters: int = DEFAULT_RESULT_CHARACTERS
) -> Tool:
    """The tool at an import path `package.module:function`.

    Raises:
        ConfigError: it cannot be imported, or its parameters have no types.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"tool {path!r} must be written package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"tool {path} cannot be imported: {error}") from error
    return tool_from(found, timeout_s=timeout_s, result_characters=result_characters)


def tool_from(
    function: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S, result_characters: int = DEFAULT_RESULT_CHARACTERS
) -> Tool:
    """A Python function as a tool: schema from its type hints, descriptions from its docstring.

    A coroutine function runs on the event loop and is cancelled when its time is up; any other
    function runs on a thread, which cannot be stopped and is left behind.

    Raises:
        ConfigError: not a function, or its signature cannot be called by names with JSON values.
    """
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"tool {function!r} is not a function")
    name = getattr(function, "__name__", type(function).__name__)
    summary, described = _docstring(function)
    arguments = _arguments_model(function, name, described)
    is_coroutine = inspect.iscoroutinefunction(function)

    async def run(text: str) -> str:
        values = _validated(arguments, text)
        given = {field.alias or key: getattr(values, key) for key, field in arguments.model_fields.items()}
        result = await (function(**given) if is_coroutine else _on_a_thread(function, given))
        return result if isinstance(result, str) else to_json(result, fallback=str).decode()

    schema = arguments.model_json_schema()
    for described_part in (schema, *schema.get("properties", {}).values()):
        described_part.pop("title", None)
    return Tool(name, summary, schema, run, timeout_s, result_characters)


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters, and a note of how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters left out]"


def _arguments_model(function: Any, name: str, described: Mapping[str, str]) -> type[BaseModel]:
    try:
        signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"tool {name}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name}: parameter {parameter.name!r} cannot be given by name")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: parameter {parameter.name!r} has no type; annotate it")
        default = ... if parameter.default is parameter.empty else parameter.default
        about = Field(alias=parameter.name, description=described.get(parameter.name))
        fields[f"p{len(fields)}"] = (Annotated[hints[parameter.name], about], default)  # any name but a model's own
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        raise ConfigError(f"tool {name}: its parameters cannot be described in JSON: {error}") from error
    return model


def _validated(arguments: type[BaseModel], text: str) -> BaseModel:
    try:
        return arguments.model_validate_json(text if text.strip() else "{}")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        told = [f"{'.'.join(map(str, p['loc'])) or 'arguments'}: {p['msg']}" for p in problems[:_SHOWN_PROBLEMS]]
        raise InvalidArguments("; ".join(told)) from error


async def _on_a_thread(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Run a blocking function on a thread of its own.

    Not on a pool: a tool that never returns would hold a worker for ever and the process at its exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = context.run(function, **given)
        except (StopIteration, SystemExit) as error:  # a future cannot carry the one, the other would end the loop
            failure = ToolFailed(f"{type(error).__name__}: {error}")
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=work, name="headwater-tool", daemon=True).start()
    return await done


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, ToolFailed) else f"{type(error).__name__}: {error}"


def _sendable(text: str) -> str:
    """Text without halves of surrogate pairs, which no request can carry."""
    return text.encode("utf-8", "replace").decode()


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Example|Examples|Note|Notes):\s*$")
_PARAMETER = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def _docstring(function: Any) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter (Google style)."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, current, indent = "", "", None
    for line in (inspect.getdoc(function) or "").splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, current, indent = heading[1], "", None
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            parameter = _PARAMETER.match(line.strip()) if depth <= indent else None
            if parameter:
                current = parameter[1]
                described[current] = parameter[2]
            elif current:
                described[current] = f"{described[current]} {line.strip()}".strip()
    return "\n".join(summary).strip(), described
