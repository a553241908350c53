"""What answers a node's requests: the engine in this process, or a model server behind it.

Both serve the same versions through the same API; a node does not care which it has.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Protocol, cast

import httpx2

from common.adapter import Adapter
from common.chat import Message
from common.errors import ConfigError
from common.identity import read_private
from common.inference.batching import Batcher, Load
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Grammars
from common.inference.engine import Engine
from common.inference.model_folder import ModelFolder
from edge_node.config import EdgeConfig, UpstreamSettings
from edge_node.serving.chat_service import ChatService
from edge_node.serving.exchange import Chat
from edge_node.serving.probe import EngineProbe, VersionProbe
from edge_node.serving.router import Loaded, Router
from edge_node.serving.upstream import Upstream, UpstreamChat
from edge_node.serving.upstream_adapters import UpstreamAdapter, UpstreamAdapters

Published = Callable[[str], Adapter]
"""A version's adapter, from its verified files."""

_PROBE_PROMPT = "What is 2+2?"
_ADAPTER_TIMEOUT_S = 60.0


class ServingEngine(Protocol):
    """Answers requests, and makes versions ready to serve."""

    @property
    def chat(self) -> Chat: ...

    @property
    def provider(self) -> str:
        """What generates, as `/healthz` says it."""
        ...

    @property
    def precision(self) -> str: ...

    @property
    def queue(self) -> Callable[[], Load] | None:
        """Requests waiting and running; None where the queue is somebody else's."""
        ...

    def load(self, adapter: Adapter) -> Loaded: ...

    def probe(self, router: Router, published: Published, clock: Callable[[], float]) -> VersionProbe: ...

    def adopted(self) -> None:
        """The versions of the last run are loaded: what is left over of it can go."""
        ...

    async def release(self) -> None:
        """End what belongs to the running event loop, which is about to end."""
        ...

    def close(self) -> None: ...


def open_engine(config: EdgeConfig, model: ModelFolder, tokenizer: ChatTokenizer, start: Adapter) -> ServingEngine:
    """The engine the settings ask for.

    Args:
        start: the adapter that changes nothing.
    Raises:
        ConfigError: it cannot serve this model here.
        TrustError: others could read the model server's key.
    """
    if config.engine.upstream is None:
        return OnnxServing(config, model, tokenizer, start)
    return UpstreamServing(config.engine.upstream, config, model, tokenizer)


class OnnxServing:
    """The engine in this process."""

    def __init__(self, config: EdgeConfig, model: ModelFolder, tokenizer: ChatTokenizer, start: Adapter) -> None:
        settings, limits = config.engine, config.limits
        self._engine = Engine(
            model,
            provider=settings.provider,
            precision=settings.precision,
            slots=settings.slots,
            context_tokens=settings.context_tokens,
            threads=settings.threads,
            provider_options=settings.provider_options,
            engine_cache=config.data_dir / "engines",
        )
        grammars = Grammars(model, tokenizer)
        self._start = start
        self._prompt_ids = tokenizer.encode([Message("user", _PROBE_PROMPT)])
        self._batcher = Batcher(  # a thread: started when nothing before it can fail any more
            self._engine, max_waiting=limits.waiting
        )
        self.chat: Chat = ChatService(
            tokenizer,
            self._batcher,
            grammars,
            max_prompt_characters=limits.prompt_characters,
            default_max_tokens=limits.default_max_tokens,
        )
        self.queue: Callable[[], Load] | None = lambda: self._batcher.load
        self.provider = self._engine.provider
        self.precision = str(self._engine.precision)

    def load(self, adapter: Adapter) -> Loaded:
        return self._engine.load(adapter)

    def probe(self, router: Router, published: Published, clock: Callable[[], float]) -> VersionProbe:
        return EngineProbe(
            self._engine,
            self._batcher,
            router,
            published=published,
            prompt_ids=self._prompt_ids,
            base=self._start,
            clock=clock,
        )

    def adopted(self) -> None:
        """Nothing is left over in a new process."""

    async def release(self) -> None:
        """The engine has a thread of its own."""

    def close(self) -> None:
        self._batcher.close()


class UpstreamServing:
    """A model server behind this node.

    A server that is not up yet is no error: the node answers that it cannot be reached until it can.

    Raises:
        ConfigError: the server refuses the key, or does not serve the model.
        TrustError: others could read the key.
    """

    provider = precision = "upstream"
    queue: Callable[[], Load] | None = None

    def __init__(
        self, settings: UpstreamSettings, config: EdgeConfig, model: ModelFolder, tokenizer: ChatTokenizer
    ) -> None:
        key = _key(settings.key_file)
        http = httpx2.Client(
            base_url=settings.base_url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(_ADAPTER_TIMEOUT_S, connect=5.0),
            trust_env=False,
            follow_redirects=False,
        )
        _check_server(http, settings.model)
        folder = (settings.adapter_folder or config.data_dir / "upstream") / config.name
        there = settings.adapter_folder_there / config.name if settings.adapter_folder_there is not None else folder
        self._adapters = UpstreamAdapters(
            http,
            site=config.name,
            model=settings.model,
            folder=folder.absolute(),
            folder_there=there.absolute(),
            loads=settings.kind == "vllm",
        )
        upstream = Upstream(settings.base_url, settings.model, settings.kind, settings.logprobs, settings.timeout_s)
        self._chat = UpstreamChat(
            upstream,
            tokenizer,
            self._adapters,
            key=key,
            vocabulary=model.dimensions.vocabulary,
            max_prompt_characters=config.limits.prompt_characters or config.limits.body_bytes,
        )
        self.chat: Chat = self._chat

    def load(self, adapter: Adapter) -> Loaded:
        return self._adapters.load(adapter)

    def probe(self, router: Router, published: Published, clock: Callable[[], float]) -> VersionProbe:
        return UpstreamProbe(self._adapters, router, published=published, clock=clock)

    def adopted(self) -> None:
        self._adapters.forget_others()

    async def release(self) -> None:
        await self._chat.close()

    def close(self) -> None:
        self._adapters.close()


class UpstreamProbe(VersionProbe):
    """What can be told from outside: the server lists the adapter's own folder, and answers differently with it."""

    def __init__(
        self, adapters: UpstreamAdapters, router: Router, *, published: Published, clock: Callable[[], float]
    ) -> None:
        super().__init__(router, published=published, clock=clock)
        self._adapters = adapters

    def _compare(self, served: Loaded, adapter: Adapter) -> tuple[str, float]:
        if served.digest != adapter.digest:
            return f"it is served under digest {served.digest[:12]}, published is {adapter.digest[:12]}", nan
        return self._adapters.look_at(cast(UpstreamAdapter, served)), nan


def _key(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        key = read_private(file).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.upstream.key_file {file} cannot be read: {type(error).__name__}") from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(f"engine.upstream.key_file {file} does not hold one key")
    return key


def _check_server(http: httpx2.Client, model: str) -> None:
    try:
        response = http.get("models")
        if response.status_code in (401, 403):
            raise ConfigError("the model server refuses this node's key; check engine.upstream.key_file")
        served = [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
    except (httpx2.HTTPError, ValueError, LookupError, TypeError):
        return  # not up yet
    if model not in served:
        raise ConfigError(f"the model server does not serve engine.upstream.model {model!r}; it serves: {served[:5]}")
