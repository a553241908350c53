"""A model server of the site's own (vLLM, or any with OpenAI's API) as a `Chat`: this node routes, records and adopts.

The server is not asked to be trusted with more than answering: its key and address
stay here, and what it says when it fails is put into our words. Everything that
decides how tokens are drawn is sent with every request, so that no default of the
server changes the distribution that is recorded.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import httpx2
from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, AsyncOpenAI

from common.errors import TransportError, TrustError
from common.inference.batching import Overloaded
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import GenerationFailed
from common.telemetry import log_event
from edge_node.serving.exchange import ChatRequest, Delta, Exchange, RequestTooLong, Unservable
from edge_node.serving.router import Choice
from edge_node.serving.upstream_adapters import UpstreamAdapter, UpstreamAdapters
from edge_node.serving.upstream_answers import Gathering, spells

logger = logging.getLogger("headwater.edge")

_CONNECT_S = 5.0
_CONNECTIONS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)  # the server has a queue, not we
_SHOWN_CHARACTERS = 300
_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError)
"""What reading an answer of another shape than OpenAI's raises."""


@dataclass(frozen=True)
class Upstream:
    """The server.

    Attributes:
        base_url: ends in /v1.
        kind: `vllm` takes and gives more than OpenAI's API has: token ids, top-k, adapters.
        logprobs: what the server's log-probabilities are of: `processed`, the distribution tokens are drawn from;
            `raw`, the model's own, before temperature and the like (vLLM's default); `none`, not to be recorded.
    """

    base_url: str
    model: str
    kind: Literal["vllm", "openai"]
    logprobs: Literal["raw", "processed", "none"]
    timeout_s: float


class UpstreamChat:
    """Serves chat requests by asking another server.

    Args:
        key: sent as bearer; empty for none.
        vocabulary: of the base model this node trains; token ids beyond it are another tokenizer's.
        max_prompt_characters: longer prompts are refused before time is spent on them.
    """

    def __init__(
        self,
        upstream: Upstream,
        tokenizer: ChatTokenizer,
        adapters: UpstreamAdapters,
        *,
        key: str,
        vocabulary: int,
        max_prompt_characters: int = 2_000_000,
    ) -> None:
        self.tokenizer = tokenizer
        self._upstream = upstream
        self._adapters = adapters
        self._key = key
        self._vocabulary = vocabulary
        self._max_characters = max_prompt_characters
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = weakref.WeakKeyDictionary()

    async def answer(self, request: ChatRequest, choice: Choice) -> Exchange:
        """All choices of a request; see `Chat`."""
        prompt_ids = await asyncio.to_thread(self._prompt_ids, request)
        gathered = self._gathering(request)
        async with self._in_our_words():
            response = await self._ask(request, _served(choice), stream=False)
            for said in response.choices:
                _take(gathered, request, said)
            prompt_ids = self._believed(_prompt_ids_of(response), request, gathered) or prompt_ids
            return self._exchange(request, choice, prompt_ids, gathered, response.usage)

    async def stream(self, request: ChatRequest, choice: Choice) -> AsyncIterator[Delta | Exchange]:
        """The same as it is generated; see `Chat`."""
        prompt_ids = await asyncio.to_thread(self._prompt_ids, request)
        gathered = self._gathering(request)
        usage: Any = None
        async with self._in_our_words():
            async with aclosing(self._chunks(request, _served(choice))) as chunks:
                async for chunk in chunks:
                    usage = chunk.usage or usage
                    prompt_ids = self._believed(_prompt_ids_of(chunk), request, gathered) or prompt_ids
                    for said in chunk.choices or ():
                        delta = _take(gathered, request, said)
                        if delta != Delta(delta.index):
                            yield delta
            yield self._exchange(request, choice, prompt_ids, gathered, usage)

    async def close(self) -> None:
        """End the connections of the running event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    # --- asking

    def _prompt_ids(self, request: ChatRequest) -> list[int]:
        """Tokens as this node's tokenizer makes them; refuses what would forge a turn before it is sent."""
        characters = request.characters
        if characters > self._max_characters:
            raise RequestTooLong(f"the request has {characters} characters; at most {self._max_characters} are taken")
        if request.prompt is not None:
            return self.tokenizer.encode_answer(request.prompt)[:-1]
        return self.tokenizer.encode(request.messages, request.tools if request.tool_choice.mode != "none" else ())

    def _believed(self, given: list[int], request: ChatRequest, gathered: Sequence[Gathering]) -> list[int]:
        """The server's ids of the prompt, if they spell it here; else none, and its log-probabilities are of no use."""
        texts = [message.content or "" for message in request.messages] + [request.prompt or ""]
        if not given or (max(given) < self._vocabulary and spells(self.tokenizer, given, texts)):
            return given
        for one in gathered:
            one.keeps_logprobs = False
        return []

    def _client(self) -> AsyncOpenAI:
        """The connections of this event loop: golden tasks are replayed on another one than requests are served on."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            timeout = httpx2.Timeout(self._upstream.timeout_s, connect=_CONNECT_S)
            http = httpx2.AsyncClient(timeout=timeout, limits=_CONNECTIONS, trust_env=False, follow_redirects=False)
            client = self._clients[loop] = AsyncOpenAI(
                base_url=self._upstream.base_url,
                api_key=self._key or "none",
                http_client=http,
                timeout=timeout,
                max_retries=0,
            )
        return client

    async def _ask(self, request: ChatRequest, served: UpstreamAdapter, *, stream: bool) -> Any:
        """Send a request; a version that the server has lost is loaded again, once."""
        client = self._client()
        create = client.chat.completions.create if request.prompt is None else client.completions.create
        body = self._body(request, served.model, stream=stream)
        try:
            return await cast(Any, create)(**body)
        except APIStatusError as error:
            if error.status_code != 404 or served.model == self._upstream.model:
                raise
            log_event(logger, "upstream lost an adapter", status=404)
            await asyncio.to_thread(self._adapters.restore, served)
            return await cast(Any, create)(**body)

    async def _chunks(self, request: ChatRequest, served: UpstreamAdapter) -> AsyncGenerator[Any]:
        stream = await self._ask(request, served, stream=True)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.close()

    def _body(self, request: ChatRequest, model: str, *, stream: bool) -> dict[str, Any]:
        sampling, vllm = request.sampling, self._upstream.kind == "vllm"
        if sampling.top_k and not vllm:
            raise Unservable("the model server behind this node does not know top_k")
        body: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": request.choices,
            "stream": stream,
        }
        extra: dict[str, Any] = {}
        if vllm:  # whatever its generation config says; and the tokens
            extra = {"top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        if request.seed is not None:
            body["seed"] = request.seed
        if request.stop:
            body["stop"] = list(request.stop)
        if sampling.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
        body |= self._conversation(request) if request.prompt is None else self._plain(request)
        return {**body, "extra_body": extra}

    def _conversation(self, request: ChatRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [message.as_openai() for message in request.messages]}
        if request.logprobs or self._keeps_logprobs(request):
            body["logprobs"] = True
        if request.top_logprobs:
            body["top_logprobs"] = request.top_logprobs
        if request.tools:
            wish = request.tool_choice
            named = {"type": "function", "function": {"name": wish.name}}
            body["tools"] = [dict(tool) for tool in request.tools]
            body["tool_choice"] = wish.mode if wish.name is None else named
            body["parallel_tool_calls"] = request.parallel_tool_calls
        if request.response_format is not None:
            form = request.response_format
            schema = {"name": "answer", "schema": dict(form.schema or {}), "strict": form.strict}
            body["response_format"] = (
                {"type": "json_object"} if form.schema is None else {"type": "json_schema", "json_schema": schema}
            )
        return body

    @staticmethod
    def _plain(request: ChatRequest) -> dict[str, Any]:
        logprobs = {"logprobs": request.top_logprobs} if request.logprobs else {}
        return {"prompt": request.prompt, **logprobs}

    def _keeps_logprobs(self, request: ChatRequest) -> bool:
        """Whether the server's log-probabilities are those of the distribution the tokens are drawn from."""
        sampling = request.sampling
        as_it_is = sampling.temperature == 1 and sampling.top_p == 1 and not sampling.top_k and not sampling.logit_bias
        free = request.response_format is None and request.tool_choice.mode != "required"
        return {"processed": True, "raw": as_it_is and free, "none": False}[self._upstream.logprobs]

    # --- answers

    def _gathering(self, request: ChatRequest) -> list[Gathering]:
        keeps = self._keeps_logprobs(request)
        return [Gathering(index, request, keeps, self._vocabulary) for index in range(request.choices)]

    def _exchange(
        self, request: ChatRequest, choice: Choice, prompt_ids: list[int], gathered: Sequence[Gathering], usage: Any
    ) -> Exchange:
        answers = [one.answer(self.tokenizer) for one in gathered]
        prompt_tokens = usage.prompt_tokens if usage is not None else len(prompt_ids)
        tokens = sum(len(answer.generation.token_ids) for answer in answers)
        completion_tokens = usage.completion_tokens if usage is not None else tokens
        return Exchange(request.id, request, choice, prompt_ids, answers, prompt_tokens, completion_tokens)

    @asynccontextmanager
    async def _in_our_words(self) -> AsyncIterator[None]:
        """Failures of the server as ours."""
        try:
            yield
        except APIStatusError as error:
            raise self._translated(error) from None
        except APITimeoutError:
            raise GenerationFailed("the model server did not answer in time") from None
        except APIConnectionError:
            raise GenerationFailed("the model server cannot be reached") from None
        except (APIError, httpx2.HTTPError) as error:
            log_event(logger, "upstream answer broke off", error=type(error).__name__)
            raise GenerationFailed("the model server's answer broke off") from None
        except (GenerationFailed, Overloaded):
            raise
        except (TransportError, TrustError) as error:  # of an adapter that could not be loaded again
            log_event(logger, "upstream adapter not restored", reason=str(error))
            raise GenerationFailed("the model server does not serve this version") from None
        except (Unservable, RequestTooLong):
            raise
        except _UNREADABLE as error:
            log_event(logger, "upstream answer unreadable", error=type(error).__name__)
            raise GenerationFailed("the model server's answer cannot be read") from None

    def _translated(self, error: APIStatusError) -> Exception:
        status, said = error.status_code, _message(error)
        log_event(logger, "upstream refused", status=status)
        match status:
            case 429:
                return Overloaded("the model server has too many requests")
            case 400 | 413 | 422 if "context length" in said or error.code == "context_length_exceeded":
                return RequestTooLong("the prompt and the answer do not fit the model server's context")
            case 400 | 422:
                return Unservable(f"the model server refuses the request: {self._without_secrets(said)}")
            case 401 | 403:
                return GenerationFailed("the model server refuses this node")
            case 404:
                return GenerationFailed("the model server does not serve this version")
            case _:
                return GenerationFailed(f"the model server failed with status {status}")

    def _without_secrets(self, said: str) -> str:
        """What the server said, unless it names what must not leave this node."""
        host = httpx2.URL(self._upstream.base_url).host
        telling = [secret for secret in (self._key, host, "headwater-") if secret and secret in said]
        return "it does not say why" if telling or not said else said[:_SHOWN_CHARACTERS]


def _served(choice: Choice) -> UpstreamAdapter:
    return cast(UpstreamAdapter, choice.version.adapter)


def _take(gathered: Sequence[Gathering], request: ChatRequest, said: Any) -> Delta:
    index = said.index
    if not isinstance(index, int) or not 0 <= index < len(gathered):
        raise ValueError("a choice that was not asked for")
    one = gathered[index]
    if request.prompt is not None:
        return one.add_text(said)
    return one.add(said, said.delta if hasattr(said, "delta") else said.message)


def _prompt_ids_of(response: Any) -> list[int]:
    """The prompt's token ids, where the server gives them: with the response, or with its choices."""
    given = getattr(response, "prompt_token_ids", None)
    for choice in response.choices or ():
        given = given or getattr(choice, "prompt_token_ids", None)
    return [int(token_id) for token_id in given or ()]


def _message(error: APIStatusError) -> str:
    body = error.body
    body = body.get("error", body) if isinstance(body, dict) else body
    return str(body.get("message", "")) if isinstance(body, dict) else str(body or "")
