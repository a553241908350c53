"""The engine in this process as a `Chat`: tokenise, generate, read what was generated.

Tokens are read on the engine's thread as they are drawn, because a stop string or
the end of a tool call ends the answer there. Nothing else of a request runs on
that thread, and a request whose client has gone ends with its next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from common.inference.batching import Batcher, Generation, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Constraint, Grammars
from common.inference.engine import LoadedAdapter
from edge_node.serving.answer_text import THOUGHT_OPENS
from edge_node.serving.exchange import ChatRequest, Delta, Exchange, RequestTooLong, Unservable
from edge_node.serving.router import Choice
from edge_node.serving.writing import Writer

DEFAULT_MAX_TOKENS = 256
LONGEST_TOKEN_CHARACTERS = 64
_QUICKLY_ENCODED_CHARACTERS = 2000
_MARK_TOKENS = 8


class ChatService:
    """Serves chat requests on the versions it is given.

    Args:
        max_prompt_characters: longer prompts are refused before time is spent on them.
        default_max_tokens: for requests that set no limit, as far as the context has room.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        batcher: Batcher,
        grammars: Grammars,
        *,
        max_prompt_characters: int | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        self.tokenizer = tokenizer
        self.batcher = batcher
        self._grammars = grammars
        self._max_characters = max_prompt_characters or batcher.engine.context_tokens * LONGEST_TOKEN_CHARACTERS
        self._default_max_tokens = default_max_tokens

    async def answer(self, request: ChatRequest, choice: Choice) -> Exchange:
        """Generate all choices of a request on one version; see `Chat`."""
        prepared = await self._prepare(request)
        writers = [Writer(index, request, self.tokenizer, prepared.thinking) for index in range(request.choices)]
        futures = self._submit(request, choice, prepared, writers)
        try:
            generations = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            _leave(writers, futures)
        for writer, generation in zip(writers, generations, strict=True):
            writer.finish(generation)
        return _exchange(request, choice, prepared.prompt_ids, writers)

    async def stream(self, request: ChatRequest, choice: Choice) -> AsyncIterator[Delta | Exchange]:
        """The same as it is generated; see `Chat`."""
        prepared = await self._prepare(request)
        said: asyncio.Queue[Delta | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(delta: Delta) -> None:
            loop.call_soon_threadsafe(said.put_nowait, delta)

        def finish(writer: Writer, generated: asyncio.Future[Generation]) -> None:
            if not generated.cancelled() and generated.exception() is None:
                said.put_nowait(writer.finish(generated.result()))

        writers = [Writer(index, request, self.tokenizer, prepared.thinking, emit) for index in range(request.choices)]
        futures = self._submit(request, choice, prepared, writers)
        generating = [asyncio.wrap_future(future) for future in futures]
        for writer, generated in zip(writers, generating, strict=True):
            generated.add_done_callback(partial(finish, writer))
        all_generated = asyncio.gather(*generating)

        def end(ended: asyncio.Future[list[Generation]]) -> None:
            if not ended.cancelled():
                ended.exception()  # seen, even if nobody waits for it any more
            said.put_nowait(None)

        all_generated.add_done_callback(end)
        try:
            while (delta := await said.get()) is not None:
                yield delta
            await all_generated
        finally:
            _leave(writers, futures)
            all_generated.cancel()
        yield _exchange(request, choice, prepared.prompt_ids, writers)

    async def _prepare(self, request: ChatRequest) -> _Prepared:
        characters = request.characters
        if characters > self._max_characters:  # before spending time on it
            raise RequestTooLong(f"the request has {characters} characters; at most {self._max_characters} are taken")
        if characters > _QUICKLY_ENCODED_CHARACTERS or request.tools or request.response_format is not None:
            prepared = await asyncio.to_thread(self._encode, request)
        else:
            prepared = self._encode(request)
        limit, length = self.batcher.engine.context_tokens, len(prepared.prompt_ids)
        if length >= limit:
            raise RequestTooLong(f"the prompt has {length} tokens; prompt and answer may have {limit}")
        if request.max_tokens is not None and length + request.max_tokens > limit:
            raise RequestTooLong(
                f"the prompt has {length} tokens and max_tokens is {request.max_tokens}; "
                f"together they may be at most {limit}"
            )
        return prepared

    def _encode(self, request: ChatRequest) -> _Prepared:
        tools = request.tools if request.tool_choice.mode != "none" else ()
        if request.prompt is not None:
            prompt_ids = self.tokenizer.encode_answer(request.prompt)[:-1]  # plain text, without an end
        else:
            prompt_ids = self.tokenizer.encode(request.messages, tools)
        ending = self.tokenizer.decode(prompt_ids[-_MARK_TOKENS:]).rstrip() if request.prompt is None else ""
        return _Prepared(
            prompt_ids,
            thinking=ending.endswith(THOUGHT_OPENS),
            constraints=[self._constraint(request, tools) for _ in range(request.choices)],
        )

    def _constraint(self, request: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> Constraint | None:
        """What one answer must look like; every answer needs its own, because it holds where the answer is."""
        form, wish = request.response_format, request.tool_choice
        if tools:
            return self._grammars.tool_calls(
                tools, required=wish.mode == "required", name=wish.name, parallel=request.parallel_tool_calls
            )
        if form is None:
            return None
        if form.schema is None:
            return self._grammars.json_object()
        return self._grammars.json_schema(form.schema, strict=form.strict)

    def _submit(
        self, request: ChatRequest, choice: Choice, prepared: _Prepared, writers: Sequence[Writer]
    ) -> list[Future[Generation]]:
        room = self.batcher.engine.context_tokens - len(prepared.prompt_ids)
        futures: list[Future[Generation]] = []
        try:
            for index, (writer, constraint) in enumerate(zip(writers, prepared.constraints, strict=True)):
                generation = GenerationRequest(
                    prepared.prompt_ids,
                    request.max_tokens or min(self._default_max_tokens, room),
                    request.sampling,
                    None if request.seed is None else request.seed + index,
                    request.top_logprobs,
                    constraint,
                    writer.watch,
                )
                futures.append(self.batcher.submit(generation, cast(LoadedAdapter, choice.version.adapter)))
        except ValueError as error:
            _leave(writers, futures)
            raise Unservable(str(error)) from error
        except BaseException:
            _leave(writers, futures)
            raise
        return futures


@dataclass(frozen=True)
class _Prepared:
    """A tokenised prompt, whether it ends in an open thought, and one constraint a choice."""

    prompt_ids: list[int]
    thinking: bool
    constraints: list[Constraint | None]


def _leave(writers: Sequence[Writer], futures: Sequence[Future[Generation]]) -> None:
    """Nobody waits for these any more: those that wait are taken out, those that run end with their next token."""
    for writer in writers:
        writer.left = True
    for future in futures:
        future.cancel()


def _exchange(request: ChatRequest, choice: Choice, prompt_ids: list[int], writers: Sequence[Writer]) -> Exchange:
    answers = [writer.answer() for writer in writers]
    tokens = sum(len(answer.generation.token_ids) for answer in answers)
    return Exchange(request.id, request, choice, prompt_ids, answers, len(prompt_ids), tokens)
