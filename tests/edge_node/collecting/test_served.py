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
from edge_node.serving.exchange import ChatRequest, ResponseFormat, ToolChoice
from edge_node.serving.router import Choice, ServedVersion
from tests.edge_node.collecting.exchanges import Site, exchange

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


def test_what_a_form_dictates_was_not_written_by_the_model(served: Served) -> None:
    """Several tokens may come next in a fixed text, its beginnings; it is fixed all the same."""
    record = served.record(response_format=form("the moon is made of green cheese"))
    assert record.messages[-1].content == '"the moon is made of green cheese"'
    assert record.sampling.constrained
    assert len(record.assistant_mask) == len(record.completion_token_ids) > 10
    assert not any(record.assistant_mask)


def test_what_a_bias_dictates_was_not_written_by_the_model(served: Served, tokenizer: ChatTokenizer) -> None:
    (token_id,) = tokenizer.encode_text("x")
    record = served.record(SamplingParameters(logit_bias=((token_id, 100.0),)), max_tokens=4)
    assert record.messages[-1].content == "xxxx"
    assert record.sampling.biased and not record.sampling.constrained
    assert not any(record.assistant_mask)


def test_an_answer_that_nothing_steered_is_the_models(served: Served) -> None:
    free = served.record()
    assert all(free.assistant_mask) and len(free.assistant_mask) == len(free.completion_token_ids)
    assert not free.sampling.biased and not free.sampling.constrained and not free.sampling.top_k
    assert served.record(SamplingParameters(top_k=7)).sampling.top_k == 7


def test_where_another_server_does_not_say_a_steered_answer_is_nobodys(tmp_path: Path) -> None:
    site = Site(tmp_path, SamplingRate(1.0))
    asked: list[dict[str, Any]] = [
        {},
        {"response_format": form("x")},
        {"tool_choice": ToolChoice("required")},
        {"sampling": SamplingParameters(logit_bias=((1, 5.0),))},
    ]
    for i, one in enumerate(asked):
        site.recorder.record(exchange(f"chatcmpl-{i}", **one))
    assert [any(record.assistant_mask) for record in site.records()] == [True, False, False, False]
