"""Agents of the `agentscope` package as it is, streaming, with and without the runner beside them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import httpx2
import pytest

from edge_node.runner import AgentCall, ExplicitMarking, SamplingRate, TrainingRunner, agent_call, mark_for_training
from tests.edge_node.runner.conftest import Served


@pytest.fixture(scope="module")
def agentscope() -> Any:
    import agentscope.agent
    import agentscope.credential
    import agentscope.message
    import agentscope.middleware
    import agentscope.model
    import agentscope.permission
    import agentscope.tool

    return agentscope


def agent_of(agentscope: Any, site: Served, *, max_tokens: int = 24, **settings: Any) -> Any:
    """An agent as its documentation makes one; streaming is what its model class does by default."""
    model = agentscope.model.OpenAIChatModel(
        agentscope.credential.OpenAICredential(api_key="EMPTY", base_url=f"{site.url}/v1"),
        model="headwater",
        parameters=agentscope.model.OpenAIChatModel.Parameters(max_tokens=max_tokens),
        max_retries=0,
    )
    assert model.stream
    return agentscope.agent.Agent("solver", "You solve problems.", model, **settings)


def question(agentscope: Any, text: str = "What is 23+45?") -> Any:
    return agentscope.message.UserMsg(name="user", content=text)


def test_an_agent_without_any_runner_is_rewarded_by_its_response_ids(site: Served, agentscope: Any) -> None:
    """What AgentScope's own trainers do: take the ids the model gives, send them back with a reward."""
    ids: list[str] = []

    class Collect(agentscope.middleware.MiddlewareBase):  # type: ignore[misc, name-defined]
        async def on_model_call(self, agent: Any, input_kwargs: dict[str, Any], next_handler: Any) -> Any:
            chunks = await next_handler(**input_kwargs)

            async def watched() -> Any:
                async for chunk in chunks:
                    ids.append(chunk.id)
                    yield chunk

            return watched()

    agent = agent_of(agentscope, site, middlewares=[Collect()])
    answer = asyncio.run(agent.reply(question(agentscope)))
    (name,) = set(ids)
    said = {"msg_ids": [name], "reward": 1.5, "task_id": "t1", "run_id": "0"}
    assert httpx2.post(f"{site.url}/feedback", json=said).json() == {"status": "success"}
    record = site.record(name)
    assert record is not None and site.reward(name) == 1.5 and record.task_id == "t1"
    assert record.messages[-1].content.strip() == (answer.get_text_content() or "").strip()
    assert len(record.completion_token_ids) == len(record.logprobs) > 0


def test_the_runner_watches_replies_and_streams_of_agents(site: Served, agentscope: Any) -> None:
    calls: list[AgentCall] = []

    def reward(call: AgentCall) -> float:
        calls.append(call)
        return len(call.text) / 100

    async def business() -> tuple[Any, list[Any]]:
        answer = await agent_of(agentscope, site).reply(question(agentscope))
        events = [e async for e in agent_of(agentscope, site).reply_stream(question(agentscope))]
        return answer, events

    with TrainingRunner(site.url, selection_strategy=SamplingRate(1.0), reward_calculator=reward):
        answer, events = asyncio.run(business())
    assert events and len(calls) == 2
    by_reply = next(call for call in calls if call.output is answer)
    assert by_reply.text.strip() == (answer.get_text_content() or "").strip()
    for call in calls:
        assert type(call.agent).__name__ == "Agent" and call.inputs.get_text_content() == "What is 23+45?"
        (name,) = call.response_ids
        assert site.reward(name) == len(call.text) / 100


def test_concurrent_calls_on_one_agent_never_swap(site: Served, agentscope: Any) -> None:
    """Replies and streams at once, whose readers do other things between events."""
    agent = agent_of(agentscope, site)
    judged: dict[str, list[str]] = {}

    def reward(call: AgentCall) -> float:
        judged.setdefault(call.inputs.get_text_content(), []).extend(call.response_ids)
        return 0.5

    async def stream(number: int) -> None:
        async for _ in agent.reply_stream(question(agentscope, f"stream {number}")):
            await asyncio.sleep(0)

    async def interleaved() -> None:
        """One task reads two streams in turn."""
        streams = [agent.reply_stream(question(agentscope, f"turn {i}")) for i in range(2)]
        while streams:
            for one in list(streams):
                try:
                    await anext(one)
                except StopAsyncIteration:
                    streams.remove(one)

    async def business() -> None:
        replies = [agent.reply(question(agentscope, f"reply {number}")) for number in range(4)]
        await asyncio.gather(*replies, *(stream(number) for number in range(4)), interleaved())

    with TrainingRunner(site.url, selection_strategy=SamplingRate(1.0), reward_calculator=reward):
        asyncio.run(business())
    kinds = (("reply", 4), ("stream", 4), ("turn", 2))
    assert set(judged) == {f"{kind} {number}" for kind, count in kinds for number in range(count)}
    ids = [name for names in judged.values() for name in names]
    assert len(set(ids)) == len(ids)
    tasks = {
        asked: {site.node.store.find([name])[name][0].task_id for name in names} for asked, names in judged.items()
    }
    assert all(len(task) == 1 for task in tasks.values())
    assert len(set.union(*tasks.values())) == len(judged)


def test_a_call_with_tools_is_one_task_with_one_reward(site: Served, agentscope: Any) -> None:
    """The first answer is made to call a tool, so the agent asks twice; the tool runs once."""
    ran: list[str] = []

    async def look_up(word: Literal["yes", "no"]) -> str:
        """Look up."""
        ran.append(word)
        return "68"

    class ForceOnce(agentscope.middleware.MiddlewareBase):  # type: ignore[misc, name-defined]
        async def on_model_call(self, agent: Any, input_kwargs: dict[str, Any], next_handler: Any) -> Any:
            mode = "none" if ran else "look_up"
            choice = agentscope.tool.ToolChoice(mode=mode)
            return await next_handler(**{**input_kwargs, "tool_choice": choice})

    toolkit = agentscope.tool.Toolkit()
    permission = agentscope.permission
    tool = agentscope.tool.FunctionTool(
        look_up,
        permission=permission.PermissionDecision(behavior=permission.PermissionBehavior.ALLOW, message="always"),
    )
    calls: list[AgentCall] = []

    def reward(call: AgentCall) -> float:
        calls.append(call)
        return float(call.tool_calls)

    async def business() -> None:
        await toolkit.add_tool(tool)
        short = agentscope.agent.InjectionConfig(inject_runtime_state=False)  # the embedded model reads 512 tokens
        while not ran:  # until the model writes its call in the tokens it has
            agent = agent_of(
                agentscope, site, max_tokens=100, toolkit=toolkit, middlewares=[ForceOnce()], injection_config=short
            )
            await agent.reply(question(agentscope))

    with TrainingRunner(site.url, selection_strategy=SamplingRate(1.0), reward_calculator=reward):
        asyncio.run(business())
    (call,) = [call for call in calls if len(call.response_ids) > 1]
    assert len(ran) == 1 == call.tool_calls
    assert [site.reward(name) for name in call.response_ids] == [1.0] * len(call.response_ids)
    last = site.record(call.response_ids[-1])
    assert last is not None
    (made,) = [c for message in last.messages for c in message.tool_calls]
    assert (made.name, made.result) == ("look_up", "68")


def test_marks_reach_the_node_through_an_agent(site: Served, agentscope: Any) -> None:
    async def business() -> None:
        agent = agent_of(agentscope, site)
        with mark_for_training("good", task_id="ticket-9"):
            await agent.reply(question(agentscope, "marked"))
        await agent.reply(question(agentscope, "plain"))

    with TrainingRunner(site.url, selection_strategy=ExplicitMarking()):
        asyncio.run(business())
    asked = {
        text
        for record in site.node.store.read(after_s=0, until_s=4e9)
        if record.task_id == "ticket-9"
        for text in ("marked", "plain")
        if text in record.messages[-2].content or any(text in m.content for m in record.messages)
    }
    assert asked == {"marked"}


def test_agents_are_themselves_again_afterwards(site: Served, agentscope: Any) -> None:
    kind = agentscope.agent.Agent
    before = kind.__dict__["reply"], kind.__dict__["reply_stream"]
    with TrainingRunner(site.url, auto_commit=False):
        assert kind.__dict__["reply"] is not before[0]
    assert (kind.__dict__["reply"], kind.__dict__["reply_stream"]) == before


def test_a_subclass_that_asks_before_its_parent_does_makes_one_call(site: Served, agentscope: Any) -> None:
    calls: list[AgentCall] = []

    class Planning(agentscope.agent.Agent):  # type: ignore[misc, name-defined]
        async def reply(self, inputs: Any = None, structured_schema: Any = None) -> Any:
            async for _ in await self.model([inputs]):
                pass
            return await super().reply(inputs)

    class Calling(Planning):
        async def reply(self, inputs: Any = None, structured_schema: Any = None) -> Any:
            return await super().reply(inputs)

    def reward(call: AgentCall) -> float:
        calls.append(call)
        return 1.0

    async def business() -> None:
        model = agent_of(agentscope, site).model
        with agent_call(inputs="planned") as call:
            call.agent = agent = Calling("planner", "You plan.", model)
            await agent.reply(question(agentscope))

    with TrainingRunner(site.url, selection_strategy=SamplingRate(1.0), reward_calculator=reward):
        asyncio.run(business())
    (call,) = calls
    assert call.inputs == "planned" and len(call.response_ids) == 2
