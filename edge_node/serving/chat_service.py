"""Answering a chat request: route, tokenise, generate, and hand the record on.

The HTTP layer and the replay of golden tasks both come through here, so what is
measured is what is served.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.chat import Message
from common.inference.batching import Batcher, Generation, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.sampling import SamplingParameters
from edge_node.serving.router import Choice

DEFAULT_MAX_TOKENS = 256
LONGEST_TOKEN_CHARACTERS = 64


class RequestTooLong(ValueError):
    """Prompt and answer do not fit the context."""


@dataclass(frozen=True)
class ChatRequest:
    """A validated request, independent of its wire format."""

    messages: Sequence[Message]
    sampling: SamplingParameters
    max_tokens: int | None
    choices: int = 1
    seed: int | None = None
    user: str | None = None
    task_id: str = ""
    run_id: str = ""
    conversation_id: str = ""


@dataclass(frozen=True)
class Answer:
    """One choice: its text, and the generation it came from."""

    text: str
    generation: Generation


@dataclass(frozen=True)
class Exchange:
    """An answered request: what is recorded and what is sent back."""

    id: str
    request: ChatRequest
    choice: Choice
    prompt_ids: list[int]
    answers: list[Answer] = field(default_factory=list)


class ChatService:
    """Serves chat requests on the versions it is given."""

    def __init__(self, tokenizer: ChatTokenizer, batcher: Batcher) -> None:
        self.tokenizer = tokenizer
        self.batcher = batcher

    async def answer(self, request: ChatRequest, choice: Choice) -> Exchange:
        """Generate all choices of a request on one version.

        Raises:
            ControlTokenInText: a message would forge a turn.
            RequestTooLong: the prompt leaves no room for `max_tokens`.
            GenerationFailed: the engine could not produce an answer.
        """
        limit = self.batcher.engine.context_tokens
        characters = sum(len(message.content or "") for message in request.messages)
        if characters > limit * LONGEST_TOKEN_CHARACTERS:  # before spending time on it
            raise RequestTooLong(f"the messages have {characters} characters; at most {limit} tokens fit")
        prompt_ids = self.tokenizer.encode(request.messages)
        room = limit - len(prompt_ids)
        if room < 1:
            raise RequestTooLong(f"the prompt has {len(prompt_ids)} tokens; prompt and answer may have {limit}")
        max_tokens = min(DEFAULT_MAX_TOKENS, room) if request.max_tokens is None else request.max_tokens
        if max_tokens > room:
            raise RequestTooLong(
                f"the prompt has {len(prompt_ids)} tokens and max_tokens is {max_tokens}; "
                f"together they may be at most {limit}"
            )
        futures = [
            self.batcher.submit(
                GenerationRequest(
                    prompt_ids,
                    max_tokens,
                    request.sampling,
                    None if request.seed is None else request.seed + index,
                ),
                choice.version.adapter,
            )
            for index in range(request.choices)
        ]
        generations = await asyncio.gather(*map(asyncio.wrap_future, futures))
        answers = [Answer(self.tokenizer.decode(g.token_ids), g) for g in generations]
        return Exchange(f"chatcmpl-{uuid.uuid4().hex}", request, choice, prompt_ids, answers)
