"""The agent on a whole node with the embedded model, which must call a tool because its answer is constrained to."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI

from common.chat import Message
from deploy.world import World
from edge_node.agent.loop import Agent, Limits, Turn
from edge_node.agent.tools import Toolbox, tool_from
from edge_node.config import EngineSettings
from edge_node.node import EdgeNode
from tests.edge_node.agent.scripted import serving


def test_calls_of_the_embedded_model_run_once_and_their_record_is_whole(world: World) -> None:
    roomy = EngineSettings(slots=2, context_tokens=512, threads=1)
    node = EdgeNode(world.setups[0].config.model_copy(update={"engine": roomy}), clock=world.clock)
    node.look_again()
    ran: list[int] = []

    def go() -> str:
        ran.append(len(ran))
        return "ok"

    async def ask(url: str) -> Turn:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            agent = Agent(
                client,
                tools=Toolbox([tool_from(go)]),
                limits=Limits(steps=2, seconds=60),
                sampling={"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0},
            )
            return await agent.run([Message("user", "Go.")], metadata={"task_id": "t1"})

    with serving(node.app) as url:
        turn = asyncio.run(ask(url))
    assert turn.ended == "steps"  # it must call, so it never answers
    assert [o.status for o in turn.outcomes] == ["ok", "ok"]
    assert ran == [0, 1]
    assert (turn.version, turn.arm) == ("v0", "stable")

    records = {r.id: r for r in node.store.read(after_s=0, until_s=4e9)}
    first, second = (records[name] for name in turn.response_ids)
    assert [r.task_id for r in (first, second)] == ["t1", "t1"]
    (call,) = second.messages[1].tool_calls
    assert (call.id, call.result) == (turn.outcomes[0].call.id, turn.outcomes[0].result)
    assert abs(call.duration_s - turn.outcomes[0].duration_s) < 1e-3
    assert first.messages[-1].tool_calls[0].arguments == turn.outcomes[0].call.arguments
    assert second.messages[-1].tool_calls[0].result == ""  # not known when it was recorded
    assert len(second.completion_token_ids) == len(second.logprobs) > 0
    node.close()
