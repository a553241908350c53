"""Requests of the OpenAI API as they arrive: what is understood, and what is refused by name.

A parameter that is not implemented is refused: ignoring it would answer another
question than the agent asked. `null` is the same as leaving a parameter out. A few
parameters change nothing about the answer and are accepted: they name the caller
for somebody else's bookkeeping.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    model_validator,
)

from edge_node.marking import encodable

MAX_CHOICES, MAX_STOP, MAX_TOP_LOGPROBS, MAX_PROMPTS = 16, 4, 20, 16
SMALLEST_TEMPERATURE = 1e-3
_LARGEST_SEED = 2**62
_LONGEST_SCHEMAS = 65_536
"""Characters, of all schemas of a request; whether or not they will be followed."""


def _usable_temperature(temperature: float) -> float:
    if 0 < temperature < SMALLEST_TEMPERATURE:
        raise ValueError(f"use 0 for greedy, or at least {SMALLEST_TEMPERATURE}")
    return temperature


def _no_penalty(value: float) -> float:
    if value != 0:
        raise ValueError("only 0 is supported")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _joined_text(value: Any) -> Any:
    """Content parts of type text as one text."""
    if not isinstance(value, list):
        return value
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content part {index} is not of type text, the only one supported")
    return "".join(part["text"] for part in value)


Text = Annotated[str, AfterValidator(encodable)]
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
Content = Annotated[
    Text, BeforeValidator(_joined_text), WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS]}, mode="validation")
]
_Id = Annotated[Text, Field(max_length=512)]
_ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    """A schema is put into the prompt as text, so all of it must be text."""
    try:
        encodable(json.dumps(value, ensure_ascii=False))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


_JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_writable)]


class _Body(BaseModel):
    """Unknown parameters are refused, no type is taken for another, absent and null are the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class FunctionCall(_Body):
    name: _ToolName
    arguments: Text


class AssistantToolCall(_Body):
    id: _Id
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients that join a stream leave it in


class SystemMessage(_Body):
    role: Literal["system", "developer"]
    content: Content
    name: Text | None = None


class UserMessage(_Body):
    role: Literal["user"]
    content: Content
    name: Text | None = None


class AssistantMessage(_Body):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: Text | None = None
    name: Text | None = None
    tool_calls: Annotated[list[AssistantToolCall], Field(min_length=1, max_length=128)] | None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None  # empty in what clients send back

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and self.tool_calls is None:
            raise ValueError("an assistant's message needs content or tool_calls")
        return self


class ToolMessage(_Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: _Id
    name: Text | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(_Body):
    name: _ToolName
    description: Text | None = None
    parameters: _JsonObject | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Body):
    name: _ToolName


class NamedToolChoice(_Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(_Body):
    name: _ToolName
    description: Text | None = None
    schema_: Annotated[_JsonObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormatField(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormatField:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and only there")
        return self


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # the padding is never sent


_BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, AfterValidator(_no_penalty), WithJsonSchema({"type": "number", "const": 0})]


class _Sampled(_Body):
    """What chat and plain completions have in common."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_usable_temperature)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-_LARGEST_SEED, le=_LARGEST_SEED)] | None = None
    stop: Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=256)]],
        BeforeValidator(_as_list),
        Field(max_length=MAX_STOP),
    ] = []
    logit_bias: Annotated[dict[_BiasKey, _Bias], Field(max_length=300)] = {}
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    user: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streams_if_it_says_how(self) -> _Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatCompletionRequest(_Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormatField | None = None
    metadata: Annotated[
        dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
    ] = {}
    store: Literal[False] = False
    modalities: list[Literal["text"]] = ["text"]
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)
        if forced and self.tools is None:
            raise ValueError("tool_choice needs tools")
        if self.tools is not None and self.tool_choice != "none" and self.structured:
            raise ValueError("response_format and tools cannot both shape one answer; use tool_choice: none")
        if isinstance(self.tool_choice, NamedToolChoice):
            names = {tool.function.name for tool in self.tools or ()}
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names {self.tool_choice.function.name}, which is not among the tools")
        return self

    @model_validator(mode="after")
    def _schemas_are_short(self) -> ChatCompletionRequest:
        schemas = [tool.function.parameters for tool in self.tools or ()]
        if self.response_format is not None and self.response_format.json_schema is not None:
            schemas.append(self.response_format.json_schema.schema_)
        if sum(len(json.dumps(schema)) for schema in schemas if schema) > _LONGEST_SCHEMAS:
            raise ValueError(f"the request's schemas have more than {_LONGEST_SCHEMAS} characters")
        return self

    @model_validator(mode="after")
    def _results_answer_calls(self) -> ChatCompletionRequest:
        called: set[str] = set()
        for message in self.messages:
            if isinstance(message, AssistantMessage):
                called |= {call.id for call in message.tool_calls or ()}
            elif isinstance(message, ToolMessage) and message.tool_call_id not in called:
                raise ValueError("a tool's message must answer a tool call made before it")
        return self

    @property
    def structured(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"


class CompletionRequest(_Sampled):
    """`POST /v1/completions`; the prompt is plain text, without the model's control tokens."""

    prompt: Annotated[list[Text], BeforeValidator(_as_list), Field(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] = 1
