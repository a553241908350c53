"""Constraints on what is generated: JSON, a JSON schema, tool calls; the grammars are llguidance's.

A `Grammars` compiles what a request asks for, on the caller's thread, into a
`Constraint` that says before each token which may come next. Schemas come from
anyone, so their size, their grammar and the work of each step are bounded: what
is too large is refused when it is compiled, or ends that one answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder

_LONGEST_SCHEMA = 65_536
_MOST_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CACHED = 32

_LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""A few milliseconds a step and a fraction of a second to compile, whatever the schema."""

_SPACING = r"(\n[ ]{0,24}|[ ])"
"""Between JSON's parts: one space, or a line break and an indent. Without a bound a model can go on with spaces."""


class InvalidSchema(ValueError):
    """A schema or tool description that cannot be followed; the message says why."""


class ConstraintFailed(ValueError):
    """The work of following this grammar went over its limit."""


class Constraint(Protocol):
    """The state of one answer that must follow a form."""

    def mask(self) -> np.ndarray:
        """Which tokens may come next: bool [V]."""

    def accept(self, token_id: int) -> None:
        """Advance by the token that was drawn."""


class GrammarConstraint:
    """One answer under an llguidance grammar.

    Raises:
        ConstraintFailed: from both methods.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def mask(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little", count=self._vocabulary).astype(bool)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(self._matcher.get_error())


class Grammars:
    """Makes constraints for one model; every call gives a fresh one, compiled forms are kept.

    Raises:
        InvalidSchema: from every method, where a form is invalid, unsupported or too large.
    """

    def __init__(self, model: ModelFolder, tokenizer: ChatTokenizer) -> None:
        self._model = model
        self._chat_tokenizer = tokenizer
        self._compiled = lru_cache(_CACHED)(self._compile)

    def json_object(self) -> GrammarConstraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Any, *, strict: bool = True) -> GrammarConstraint:
        """JSON that validates against `schema`; unless strict, keywords that cannot be followed are ignored."""
        return self._start(f"start: %json {_schema_text(schema, strict=strict)}\n")

    def tool_calls(
        self, tools: Sequence[Mapping[str, Any]], *, required: bool, name: str | None = None, parallel: bool = True
    ) -> GrammarConstraint:
        """Text, or calls in the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or text and then calls.

        Args:
            tools: in the shape of the OpenAI API; `strict` functions have every keyword of their schema followed.
            required: nothing but calls, and at least one.
            name: the one tool that may be called.
            parallel: whether more than one call may be made.
        """
        functions = _functions(tools)
        if name is not None:
            if name not in functions:
                raise InvalidSchema(f"tool_choice names {name!r}, which is not among the tools")
            functions = {name: functions[name]}
        if required:
            rules = ['start: "<tool_call>" call']
        else:
            rules = [
                "start: TEXT | calling call",
                "TEXT: /(?s:.*)/",
                'calling[lazy]: TEXT "<tool_call>"',  # ends, and with it TEXT, where a call begins
            ]
        more = ' (NEWLINE? "<tool_call>" body)*' if parallel else ""
        rules += [f"call: body{more}", r"NEWLINE: /\n/", 'body: NEWLINE? function NEWLINE? "</tool_call>"']
        rules.append("function: " + " | ".join(f"function_{index}" for index in range(len(functions))))
        for index, (function, schema) in enumerate(functions.items()):
            opening = json.dumps(f'{{"name": "{function}", "arguments": ')
            rules += [f'function_{index}: {opening} arguments_{index} "}}"', f"arguments_{index}: %json {schema}"]
        return self._start("\n".join(rules) + "\n")

    def _start(self, grammar: str) -> GrammarConstraint:
        return GrammarConstraint(self._compiled(grammar).deep_copy(), self._model.dimensions.vocabulary)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
            raise InvalidSchema("nothing satisfies the schema")
        if matcher.is_error():
            raise InvalidSchema(_reason(matcher.get_error()))
        return matcher

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(
            self._chat_tokenizer.definition(),
            n_vocab=self._model.dimensions.vocabulary,
            eos_token=sorted(self._model.end_tokens),
        )


def _reason(error: str) -> str:
    """What llguidance says is wrong, without the place in our grammar."""
    first = (error.removesuffix("<non-verbose/>").strip() or "unknown").splitlines()[0]
    return "the schema cannot be followed: " + first.rpartition("failed to compile JSON schema: ")[2][:300]


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The text of each function's argument schema, by name."""
    if not 0 < len(tools) <= _MOST_TOOLS:
        raise InvalidSchema(f"there are {len(tools)} tools; from 1 to {_MOST_TOOLS} can be given")
    functions: dict[str, str] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise InvalidSchema("a tool needs a function with a name of letters, digits, _ and -, at most 64")
        if name in functions:
            raise InvalidSchema(f"two tools have the name {name!r}")
        parameters = function.get("parameters")
        schema = parameters or {"type": "object"}
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise InvalidSchema(f"the parameters of {name!r} are not the schema of an object")
        functions[name] = _schema_text({"type": "object", **schema}, strict=function.get("strict") is True)
    if sum(map(len, functions.values())) > _LONGEST_SCHEMA:
        raise InvalidSchema(f"the tools' schemas have more than {_LONGEST_SCHEMA} characters")
    return functions


def _schema_text(schema: Any, *, strict: bool) -> str:
    """The schema as JSON, with our own options in place of any it brings."""
    if not isinstance(schema, Mapping):
        raise InvalidSchema("a schema must be a JSON object")
    options = {"whitespace_flexible": True, "whitespace_pattern": _SPACING, "lenient": not strict}
    try:
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidSchema("the schema is not JSON, or nested too deeply") from error
    if len(text) > _LONGEST_SCHEMA:
        raise InvalidSchema(f"the schema has {len(text)} characters; at most {_LONGEST_SCHEMA} are read")
    return text
