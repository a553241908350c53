"""A request is measured whole, whoever answers it and whatever is done with its parts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from common.chat import Message, ToolCall
from common.inference.batching import Batcher
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Grammars
from common.inference.engine import Engine
from common.inference.sampling import SamplingParameters
from edge_node.serving.chat_service import ChatService
from edge_node.serving.exchange import Chat, ChatRequest, RequestTooLong, ToolChoice
from edge_node.serving.router import Choice
from edge_node.serving.upstream import Upstream, UpstreamChat
from edge_node.serving.wire import ChatCompletionRequest

LONG = "a" * 1000
HELLO = Message("user", "hello")
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}

ASKED: dict[str, dict[str, Any]] = {
    "content": {"messages": [Message("user", LONG)]},
    "reasoning": {"messages": [HELLO, Message("assistant", "x", reasoning=LONG), HELLO]},
    "name": {"messages": [Message("user", "hello", LONG)]},
    "arguments": {"messages": [Message("assistant", None, tool_calls=(ToolCall("c", "f", LONG),))]},
    "id of a call": {"messages": [Message("assistant", None, tool_calls=(ToolCall(LONG, "f", "{}"),))]},
    "result's call": {"messages": [Message("tool", "ok", tool_call_id=LONG)]},
    "user": {"user": LONG},
    "tools": {"tools": (TOOL,)},
    "tools that must not be called": {"tools": (TOOL,), "tool_choice": ToolChoice("none")},
    "plain prompt": {"messages": [], "prompt": LONG},
}


def request_with(**asked: Any) -> ChatRequest:
    fields: dict[str, Any] = {"messages": [HELLO], "sampling": SamplingParameters(), "max_tokens": 4}
    return ChatRequest(**fields | asked)


@pytest.fixture(scope="module")
def chats(engine: Engine, tokenizer: ChatTokenizer) -> dict[str, Chat]:
    batcher = cast(Batcher, SimpleNamespace(engine=engine))  # nothing gets this far
    upstream = Upstream("http://127.0.0.1:9/v1", "m", "vllm", "none", 1.0)
    return {
        "here": ChatService(tokenizer, batcher, Grammars(engine.model, tokenizer), max_prompt_characters=500),
        "upstream": UpstreamChat(
            upstream, tokenizer, cast(Any, None), key="", vocabulary=100, max_prompt_characters=500
        ),
    }


@pytest.mark.parametrize("where", ["here", "upstream"])
@pytest.mark.parametrize("place", ASKED)
def test_every_text_counts(chats: dict[str, Chat], where: str, place: str) -> None:
    with pytest.raises(RequestTooLong, match="characters"):
        asyncio.run(chats[where].answer(request_with(**ASKED[place]), cast(Choice, None)))


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_schemas_are_bounded_whether_or_not_they_are_followed(choice: str) -> None:
    def body(properties: int) -> str:
        schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in "fg"]
        asked = {"model": "headwater", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
        return json.dumps({**asked, "tool_choice": choice})

    ChatCompletionRequest.model_validate_json(body(500))
    with pytest.raises(ValidationError, match="schemas have more than"):
        ChatCompletionRequest.model_validate_json(body(1500))
