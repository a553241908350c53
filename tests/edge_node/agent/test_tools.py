"""Tools from functions: what they are described as, and that a call never raises and runs once."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from common.chat import ToolCall
from common.errors import ConfigError
from edge_node.agent import tools
from edge_node.agent.tools import Toolbox, ToolFailed, ToolOutcome, load_tool, tool_from


class Priority(Enum):
    LOW = "low"
    HIGH = "high"


class Address(BaseModel):
    street: str
    number: int


def send(to: Address, body: str, priority: Priority = Priority.LOW, copies: list[str] | None = None, schema: int = 0):
    """Send a letter.

    It is sent once.

    Args:
        to: where it goes,
            in this town
        body (str): what it says
        copies: who else gets it
    Returns:
        to: not a parameter
    """
    return {"to": to, "body": body, "priority": priority.value, "schema": schema}


def call(tool: Any, arguments: str, **settings: Any) -> ToolOutcome:
    made = tool_from(tool, **settings)
    return asyncio.run(Toolbox([made]).call(ToolCall("c1", made.name, arguments)))


def test_the_schema_says_what_the_signature_and_docstring_say() -> None:
    definition = tool_from(send).definition
    assert definition["type"] == "function"
    function = definition["function"]
    assert function["name"] == "send"
    assert function["description"] == "Send a letter.\n\nIt is sent once."
    parameters = function["parameters"]
    assert parameters["required"] == ["to", "body"]
    assert parameters["additionalProperties"] is False
    described = {name: p.get("description") for name, p in parameters["properties"].items()}
    assert described == {
        "to": "where it goes, in this town",
        "body": "what it says",
        "priority": None,
        "copies": "who else gets it",
        "schema": None,
    }
    assert parameters["properties"]["schema"] == {"default": 0, "type": "integer"}
    json.dumps(definition)


def test_arguments_arrive_as_the_types_they_were_declared_with() -> None:
    got = call(send, '{"to": {"street": "Main", "number": 3}, "body": "hi", "priority": "high", "schema": 2}')
    assert got.status == "ok"
    assert json.loads(got.result) == {
        "to": {"street": "Main", "number": 3},
        "body": "hi",
        "priority": "high",
        "schema": 2,
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "to: Field required"),
        ("{", "Invalid JSON"),
        ("[]", "arguments: "),
        ("null", "arguments: "),
        ('{"to": {"street": "x", "number": "three"}, "body": "b"}', "to.number: Input should be a valid integer"),
        ('{"to": {"street": "x", "number": 1}, "body": "b", "cc": []}', "cc: Extra inputs are not permitted"),
        ('{"to": {"street": "x", "number": 1}, "body": "b", "priority": "urgent"}', "priority: Input should be"),
        ("[" * 100_000, "arguments: "),
    ],
)
def test_arguments_that_do_not_fit_are_told_and_nothing_runs(arguments: str, told: str) -> None:
    ran: list[str] = []

    def send_and_note(to: Address, body: str, priority: Priority = Priority.LOW) -> str:
        ran.append(body)
        return "sent"

    got = call(send_and_note, arguments)
    assert got.status == "invalid-arguments"
    assert told in got.result
    assert ran == []


def test_a_failing_tool_is_an_observation() -> None:
    def fails(kind: Literal["value", "said", "exit", "stop", "timeout"]) -> str:
        raise {
            "value": ValueError("bad value"),
            "said": ToolFailed("there is no such file"),
            "exit": SystemExit(3),
            "stop": StopIteration("over"),
            "timeout": TimeoutError(),
        }[kind]

    def told(kind: str) -> tuple[str, str]:
        got = call(fails, json.dumps({"kind": kind}))
        return got.status, got.result

    assert told("value") == ("failed", "error: ValueError: bad value")
    assert told("said") == ("failed", "error: there is no such file")
    assert told("exit") == ("failed", "error: SystemExit: 3")
    assert told("stop")[0] == "failed"
    assert told("timeout") == ("failed", "error: TimeoutError")


def test_a_coroutine_cannot_end_the_process() -> None:
    async def leaves() -> str:
        sys.exit(3)

    assert call(leaves, "{}").status == "failed"


def test_a_tool_that_cancels_itself_does_not_cancel_the_agent() -> None:
    async def gives_up() -> str:
        raise asyncio.CancelledError

    assert call(gives_up, "{}").status == "failed"


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_tool_is_cut_off(blocking: bool) -> None:
    ended = threading.Event()

    def blocks() -> str:
        ended.wait(60)
        return "late"

    async def sleeps() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return "late"

    started = time.monotonic()
    got = call(blocks if blocking else sleeps, "", timeout_s=0.05)
    assert time.monotonic() - started < 30
    assert got.status == "timeout"
    assert "longer than 0.05 s" in got.result
    assert 0.04 < got.duration_s < 30
    assert ended.is_set() is not blocking
    ended.set()


def test_an_unknown_tool_names_the_known_ones() -> None:
    box = Toolbox([tool_from(send)])
    got = asyncio.run(box.call(ToolCall("c1", "x" * 1000, "{}")))
    assert got.status == "unknown-tool"
    assert got.result.endswith("tools: send")
    assert len(got.result) < 200


def test_long_results_and_long_errors_are_cut_and_say_so() -> None:
    def talks(fail: bool) -> str:
        if fail:
            raise ToolFailed("y" * 300)
        return "x" * 300

    got = call(talks, '{"fail": false}', result_characters=100)
    assert got.result == "x" * 100 + "\n[200 more characters left out]"
    assert "[200 more characters left out]" in call(talks, '{"fail": true}', result_characters=100).result


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(st.characters()), lambda x: st.lists(x, max_size=3))
)
def test_any_result_can_be_sent(value: Any) -> None:
    def gives() -> Any:
        return value

    got = call(gives, "{}")
    assert isinstance(got.result, str)
    json.dumps(got.result).encode()
    got.result.encode()


def test_a_result_that_is_not_json_is_an_observation() -> None:
    def circular() -> Any:
        made: list[Any] = []
        made.append(made)
        return made

    assert call(circular, "{}").status == "failed"


def test_a_lone_surrogate_does_not_break_the_next_request() -> None:
    def half() -> str:
        return "\ud83d"

    call(half, "{}").result.encode()


def no_types(x):  # type: ignore[no-untyped-def]
    return x


def many(*values: int) -> int:
    return sum(values)


def positional(x: int, /) -> int:
    return x


def odd_type(x: threading.Thread) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [(no_types, "has no type"), (many, "cannot be given by name"), (positional, "cannot be given by name"),
     (odd_type, "cannot be described"), (Address, "is not a function"), (3, "is not a function")],
)  # fmt: skip
def test_what_cannot_be_a_tool_is_refused_at_once(function: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tool_from(function)


def test_tools_by_import_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_tools.py").write_text(
        "class Files:\n    @staticmethod\n    def count(folder: str) -> int:\n        '''Count files.'''\n        return 3\n"
    )
    (tmp_path / "broken_tools.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_tool("our_tools:Files.count", timeout_s=2)
    assert (loaded.name, loaded.description, loaded.timeout_s) == ("count", "Count files.", 2)
    assert asyncio.run(loaded.run('{"folder": "x"}')) == "3"
    for path in ("our_tools", "our_tools:", ":count", "our_tools:Files.nothing", "not_there:f", "broken_tools:f"):
        with pytest.raises(ConfigError, match="tool"):
            load_tool(path)
    sys.modules.pop("our_tools", None)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools"):
        Toolbox([tool_from(send), tool_from(send)])


def test_a_name_the_api_does_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have"):
        tools.Tool("a b", "", {}, lambda _: asyncio.sleep(0, ""))
