"""What is asked and what is answered, independent of the wire format and of who answers.

`Chat` is the seam between the HTTP layer and what answers: `ChatService` is the
engine in this process, another may stand in front of a server. The HTTP layer and
the replay of golden tasks both come through it, so what is measured is what is
served.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from common.chat import Message, ToolCall
from common.inference.batching import Generation
from common.inference.sampling import SamplingParameters
from edge_node.marking import Mark
from edge_node.serving.router import Choice

LOCAL_KEY = "local"
"""Key id of a caller on this machine where no API keys are set up."""


class RequestTooLong(ValueError):
    """Prompt and answer do not fit the context."""


class Unservable(ValueError):
    """The request asks for what the model does not have."""


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may, must or must not call a tool; `name` is the one it must call."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class ResponseFormat:
    """The answer is a JSON object, or one that matches `schema`; `strict` follows every keyword of it."""

    schema: Mapping[str, Any] | None = None
    strict: bool = False


def new_response_id() -> str:
    """The id of a response, by which feedback names it."""
    return f"chatcmpl-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class ChatRequest:
    """A validated request, independent of its wire format.

    Attributes:
        prompt: plain text to continue instead of a conversation (`/v1/completions`); such exchanges are not recorded.
        tools: OpenAI tool definitions, `{"type": "function", "function": {...}}`.
        logprobs: log-probabilities are wanted, of `top_logprobs` further tokens each.
        key_id: which API key asked.
        metadata: what the caller sent along; never interpreted but for its `task_id` and `run_id`.
    """

    messages: Sequence[Message]
    sampling: SamplingParameters
    max_tokens: int | None
    choices: int = 1
    seed: int | None = None
    user: str | None = None
    task_id: str = ""
    run_id: str = ""
    conversation_id: str = ""
    id: str = field(default_factory=new_response_id)
    prompt: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    key_id: str = LOCAL_KEY
    marking: Mark | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> Iterator[str]:
        """Every text that came with the request, once, but for tools and schemas."""
        for message in self.messages:
            yield from filter(None, (message.content, message.reasoning, message.name, message.tool_call_id))
            for call in message.tool_calls:
                yield from (call.id, call.name, call.arguments)
        yield from filter(None, (self.prompt, self.user, *self.stop))
        for key, value in self.metadata.items():
            yield from (key, value)

    @property
    def characters(self) -> int:
        """Of all that came with the request, the definitions of its tools included."""
        return sum(map(len, self.texts)) + sum(len(json.dumps(tool, ensure_ascii=False)) for tool in self.tools)


@dataclass(frozen=True)
class TokenLogprob:
    """A token as text and bytes, its log-probability, and the likeliest tokens in its place.

    `bytes` is None where the token is a part of a character.
    """

    token: str
    bytes: bytes | None
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One choice.

    Attributes:
        text: everything generated up to a stop string, as written: thoughts and tool calls too.
        generation: the tokens it came from; without token ids where another server generated.
        message: the assistant's turn as the client gets it.
        finish_reason: stop, length or tool_calls.
        logprobs: one per token, where the request asked for them.
    """

    text: str
    generation: Generation
    message: Message
    finish_reason: str = "stop"
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """An answered request: what is recorded and what is sent back.

    Attributes:
        prompt_ids: empty where another server tokenised.
        prompt_tokens, completion_tokens: what is billed.
    """

    id: str
    request: ChatRequest
    choice: Choice
    prompt_ids: list[int]
    answers: list[Answer] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """What choice `index` says next; a tool call comes whole, `finish_reason` with the last delta of a choice."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


class Chat(Protocol):
    """Answers requests on the version they were routed to.

    Both methods raise before anything is answered:
        ControlTokenInText: a message would forge a turn.
        RequestTooLong: the prompt leaves no room for `max_tokens`.
        Unservable: a token of `logit_bias` does not exist.
        InvalidSchema: a tool or response format has no usable JSON schema.
        Overloaded: too many requests wait; ask again later.
        GenerationFailed: no answer could be produced; `stream` may raise it also later.
    Cancelling the task that awaits them, or closing the iterator, ends the generation.
    """

    async def answer(self, request: ChatRequest, choice: Choice) -> Exchange:
        """All choices of a request."""
        ...

    def stream(self, request: ChatRequest, choice: Choice) -> AsyncIterator[Delta | Exchange]:
        """The same as it is generated; the last item is the exchange, whole."""
        ...
