"""What a real engine answers, as it is recorded: what only its tokens tell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.adapter import Adapter
from common.chat import Message
from common.inference.batching import Batcher
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Grammars
from common.inference.engine import Engine
from common.inference.model_folder import ModelFolder
from common.inference.sampling import SamplingParameters
from edge_node.collecting.selection import SamplingRate
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.serving.chat_service import ChatService
from edge_node.serving.exchange import ChatRequest, ResponseFormat
from edge_node.serving.router import Choice, ServedVersion
from tests.edge_node.collecting.exchanges import Site

QUESTION = [Message("user", "What is 2+2?")]


@pytest.fixture(scope="module")
def service(model: ModelFolder, tokenizer: ChatTokenizer) -> Iterator[ChatService]:
    batcher = Batcher(Engine(model, slots=2, context_tokens=512, threads=1))
    yield ChatService(tokenizer, batcher, Grammars(model, tokenizer))
    batcher.close()


class Served:
    """A site that records what the engine answers."""

    def __init__(self, folder: Path, service: ChatService, start: Adapter) -> None:
        self._site = Site(folder, SamplingRate(1.0), decode=service.tokenizer.decode)
        self._service = service
        self._choice = Choice("stable", ServedVersion("v3", service.batcher.engine.load(start)))

    def record(self, sampling: SamplingParameters | None = None, **asked: Any) -> Trajectory:
        request = ChatRequest(QUESTION, sampling or SamplingParameters(), **{"max_tokens": 40, "seed": 1} | asked)
        self._site.recorder.record(asyncio.run(self._service.answer(request, self._choice)))
        return self._site.records()[-1]


@pytest.fixture
def served(tmp_path: Path, service: ChatService, start: Adapter) -> Served:
    return Served(tmp_path, service, start)


def form(text: str) -> ResponseFormat:
    """Nothing but this text."""
    return ResponseFormat({"const": text}, strict=True)


def test_what_only_the_prompts_tokens_spell_is_not_stored(served: Served) -> None:
    """Tools are in the prompt and in no message."""
    function = {"name": "mail", "description": "to jane@example.org", "parameters": {"type": "object"}}
    record = served.record(tools=({"type": "function", "function": function},), max_tokens=4)
    assert "email" in record.redactions
    assert not record.prompt_token_ids and not record.completion_token_ids and not record.logprobs


def test_what_a_stop_string_cut_off_is_not_stored(served: Served) -> None:
    record = served.record(stop=("moon",), response_format=form("the password=moon"))
    assert record.messages[-1].content == '"the password='
    assert dict(record.redactions) == {"password": 1}
    assert not record.prompt_token_ids and not record.completion_token_ids and not record.logprobs


def test_what_tells_nothing_keeps_its_tokens(served: Served) -> None:
    assert served.record().completion_token_ids
