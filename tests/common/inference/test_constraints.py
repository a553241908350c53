"""Constrained answers of the embedded model, at a temperature where it writes nonsense, against jsonschema."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from common.adapter import Adapter
from common.chat import has_invalid_tool_call
from common.inference.batching import Batcher, Generation, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Constraint, ConstraintFailed, Grammars, InvalidSchema
from common.inference.engine import Engine, GenerationFailed
from common.inference.model_folder import ModelFolder
from common.inference.sampling import SamplingParameters

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {
    "object": ADD,
    "nested": {
        "type": "object",
        "properties": {"points": {"type": "array", "items": ADD, "minItems": 1, "maxItems": 2}},
        "required": ["points"],
        "additionalProperties": False,
    },
    "choice": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"enum": [5, 71]}]},
    "text": {"type": "string", "pattern": "^[a-f]{2,8}$"},
    "short text": {"type": "string", "maxLength": 12},
    "bounded": {"type": "integer", "minimum": -3, "maximum": 40},
    "recursive": {
        "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
        "$ref": "#/$defs/n",
    },
}
Answer = Callable[[Constraint], Generation]


@pytest.fixture(scope="module")
def grammars(model: ModelFolder, tokenizer: ChatTokenizer) -> Grammars:
    return Grammars(model, tokenizer)


@pytest.fixture(scope="module")
def answers(model: ModelFolder, tokenizer: ChatTokenizer, start: Adapter) -> Iterator[Callable[..., list[Generation]]]:
    engine = Engine(model, slots=8, context_tokens=400, threads=1)
    batcher, adapter = Batcher(engine), engine.load(start)

    def run(make: Callable[[], Constraint], count: int) -> list[Generation]:
        futures = [
            batcher.submit(
                GenerationRequest([2, 40, 50], 390, SamplingParameters(2.0), seed=seed, constraint=make()), adapter
            )
            for seed in range(count)
        ]
        return [future.result(timeout=60) for future in futures]

    yield run
    batcher.close()


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_validates(
    grammars: Grammars, tokenizer: ChatTokenizer, answers: Callable[..., list[Generation]], name: str
) -> None:
    found = answers(lambda: grammars.json_schema(SCHEMAS[name]), 16)
    ended = [tokenizer.decode(g.token_ids) for g in found if g.finish_reason == "stop"]
    assert len(ended) >= 12
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert len(set(ended)) > 1
    assert all(np.isfinite(g.logprobs).all() for g in found)


def test_a_json_object_is_an_object(
    grammars: Grammars, tokenizer: ChatTokenizer, answers: Callable[..., list[Generation]]
) -> None:
    ended = [tokenizer.decode(g.token_ids) for g in answers(grammars.json_object, 12) if g.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("name", [None, "add"])
def test_required_tools_are_called_and_nothing_else_is_written(
    grammars: Grammars, tokenizer: ChatTokenizer, answers: Callable[..., list[Generation]], name: str | None
) -> None:
    found = answers(lambda: grammars.tool_calls(TOOLS, required=True, name=name, parallel=False), 16)
    texts = [tokenizer.decode(g.token_ids) for g in found if g.finish_reason == "stop"]
    assert len(texts) >= 8
    called = set()
    for text in texts:
        assert not has_invalid_tool_call(text)
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        called.add(call["name"])
        jsonschema.validate(call["arguments"], ADD if call["name"] == "add" else {"type": "object"})
    assert called == ({name} if name else {"add", "now"})


def follows(constraint: Constraint, tokenizer: ChatTokenizer, text: str) -> str:
    """The part of `text` that the constraint permits, with `$` where the answer may end."""
    accepted: list[int] = []
    for token in tokenizer.encode_text(text):
        if not constraint.mask()[token]:
            return tokenizer.decode(accepted)
        constraint.accept(token)
        accepted.append(token)
    return text + ("$" if constraint.mask()[1] else "")


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "followed"),
    [
        ("hello <b> <tool_ca", "hello <b> <tool_ca$"),
        ("hello\n" + CALL, "hello\n" + CALL + "$"),
        (CALL, CALL + "$"),
        (CALL + "\n" + CALL, CALL + "\n" + CALL + "$"),
        (CALL + " and", CALL),
        ('<tool_call>{"name": "nope', '<tool_call>{"name": "no'),
        ("", "$"),
    ],
)
def test_optional_tools_leave_text_free_and_bind_what_begins_a_call(
    grammars: Grammars, tokenizer: ChatTokenizer, text: str, followed: str
) -> None:
    assert follows(grammars.tool_calls(TOOLS, required=False), tokenizer, text) == followed


def test_calls_can_be_limited_to_one(grammars: Grammars, tokenizer: ChatTokenizer) -> None:
    one = grammars.tool_calls(TOOLS, required=False, parallel=False)
    assert follows(one, tokenizer, CALL + "\n" + CALL) == CALL


def test_every_request_gets_a_state_of_its_own(grammars: Grammars, tokenizer: ChatTokenizer) -> None:
    first, second = grammars.json_schema(ADD), grammars.json_schema(ADD)
    assert follows(first, tokenizer, '{"a": 12') == '{"a": 12'
    assert follows(second, tokenizer, '{"a": 12') == '{"a": 12'


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "wat"}, "wat"),
        ({"properties": 5}, "properties must be an object"),
        ({"not": {}}, "not"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"$ref": "http://example.org/x"}, "example.org"),
        ({"$ref": "file:///etc/passwd"}, "passwd"),
        ({"type": "string", "pattern": "("}, "regex|group"),
        ({"type": "string", "pattern": r"(a)\1"}, "regex|backreference"),
        ([], "JSON object"),
        ("{}", "JSON object"),
        ({"const": float("nan")}, "not JSON"),
        ({"enum": ["x" * 70_000]}, "characters"),
        ({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}, "nothing satisfies|cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(grammars: Grammars, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidSchema, match=reason):
        grammars.json_schema(schema)


def test_a_tool_need_not_be_strict(grammars: Grammars, tokenizer: ChatTokenizer) -> None:
    loose = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": loose}}
    text = '<tool_call>{"name": "f", "arguments": {"a": 12}}</tool_call>'
    assert follows(grammars.tool_calls([tool], required=True), tokenizer, text) == text + "$"
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    with pytest.raises(InvalidSchema, match="not"):
        grammars.tool_calls([strict], required=True)


def test_a_schema_cannot_bring_options_of_its_own(grammars: Grammars) -> None:
    with pytest.raises(InvalidSchema, match="not"):
        grammars.json_schema({"not": {}, "x-guidance": {"lenient": True}})


@pytest.mark.parametrize(
    ("tools", "name", "reason"),
    [
        ([], None, "0 tools"),
        ([{"type": "function"}], None, "needs a function"),
        ([{"type": "function", "function": {"name": 'x" | TEXT'}}], None, "letters, digits"),
        ([{"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}], None, "object"),
        ([{"type": "function", "function": {"name": "x", "parameters": [1]}}], None, "object"),
        ([TOOLS[0], TOOLS[0]], None, "two tools"),
        ([TOOLS[0]] * 200, None, "200 tools"),
        (TOOLS, "absent", "absent"),
    ],
)
def test_invalid_tools_are_refused(grammars: Grammars, tools: list[Any], name: str | None, reason: str) -> None:
    with pytest.raises(InvalidSchema, match=reason):
        grammars.tool_calls(tools, required=False, name=name)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(kind: str, levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {"d0": {"type": "object"}}
    for level in range(1, levels):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {kind: [below, below]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{levels - 1}"}


HOSTILE = {
    "deep": nested(200),
    "deeper than the stack": nested(20_000),
    "repeated pattern": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "backtracking": {"type": "string", "pattern": "^(a|a|b)*(a|b){300}$"},
    "letters": {"type": "string", "pattern": r"^(\p{L}{1,500}\w{1,500}){1,100}$"},
    "a billion items": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    "any of doubling": doubling("anyOf", 40),
    "all of doubling": doubling("allOf", 30),
    "product": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"k{i}": {"const": j}}} for j in range(6)]} for i in range(8)
        ]
    },
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
    "large factor": {"type": "integer", "multipleOf": 999_999_937},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_or_costs_little(grammars: Grammars, name: str) -> None:
    """The bound is far above what it takes, and far below what a hang would."""
    began = time.process_time()
    rng = np.random.default_rng(0)
    try:
        constraint = grammars.json_schema(HOSTILE[name])
        for _ in range(200):
            token = int(rng.choice(np.flatnonzero(constraint.mask())))
            if token == 1:
                break
            constraint.accept(token)
    except (InvalidSchema, ConstraintFailed):
        pass
    assert time.process_time() - began < 5


def test_a_grammar_that_grows_too_large_ends_its_own_answer_only(
    grammars: Grammars, answers: Callable[..., list[Generation]]
) -> None:
    with pytest.raises(GenerationFailed, match="ConstraintFailed"):
        answers(lambda: grammars.json_schema(HOSTILE["letters"]), 4)
    assert answers(grammars.json_object, 1)
