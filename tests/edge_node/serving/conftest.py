"""A node's HTTP face on loopback, shared by the tests of a session: real server, real engine, embedded model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fastapi import FastAPI
from openai import OpenAI

from common.adapter import Adapter
from common.inference.batching import Batcher
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Grammars
from common.inference.engine import Engine
from common.inference.model_folder import ModelFolder
from edge_node.config import LimitSettings
from edge_node.serving.chat_service import ChatService
from edge_node.serving.exchange import Exchange
from edge_node.serving.keys import KeyRing
from edge_node.serving.openai_api import create_app
from edge_node.serving.router import Arms, Router, ServedVersion
from edge_node.serving.server import NodeServer


@dataclass
class Recorded:
    """A recorder that keeps what it is given."""

    exchanges: list[Exchange] = field(default_factory=list)

    def record(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)


@contextmanager
def on_loopback(
    app: FastAPI, *, limits: LimitSettings | None = None, keys: KeyRing | None = None
) -> Iterator[tuple[str, NodeServer]]:
    """The app behind the node's own server; its URL."""
    keys = keys or KeyRing(Path("/nonexistent/api_keys.json"))
    server = NodeServer(app, host="127.0.0.1", port=0, limits=limits or LimitSettings(), keys=keys)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        thread.join(timeout=10)


@dataclass
class Served:
    """What a test can look at beside the URL."""

    url: str
    app: FastAPI
    service: ChatService
    router: Router
    recorded: Recorded
    engine: Engine
    start: Adapter

    @property
    def batcher(self) -> Batcher:
        return self.service.batcher

    def client(self, **settings: int) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=settings.get("max_retries", 0))


@pytest.fixture(scope="session")
def large_engine(model: ModelFolder) -> Engine:
    """Room for tools in the prompt."""
    return Engine(model, slots=8, context_tokens=512, threads=1)


@pytest.fixture(scope="session")
def grammars(model: ModelFolder, tokenizer: ChatTokenizer) -> Grammars:
    return Grammars(model, tokenizer)


@pytest.fixture(scope="session")
def session_served(
    large_engine: Engine, tokenizer: ChatTokenizer, grammars: Grammars, start: Adapter
) -> Iterator[Served]:
    batcher = Batcher(large_engine, max_waiting=512)
    service = ChatService(tokenizer, batcher, grammars)
    router = Router(Arms(ServedVersion("v0", large_engine.load(start))))
    recorded = Recorded()
    app = create_app(
        service, router, recorded, provider=large_engine.provider, load=lambda: batcher.load, limits=LimitSettings()
    )
    with on_loopback(app) as (url, _):
        yield Served(url, app, service, router, recorded, large_engine, start)
    batcher.close()


@pytest.fixture
def served(session_served: Served) -> Iterator[Served]:
    """The session's node with its first version stable and nothing recorded."""
    session_served.recorded.exchanges.clear()
    arms = session_served.router.arms
    yield session_served
    session_served.router.arms = arms


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client
