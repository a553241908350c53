"""The runner beside business code that knows nothing of it, against a real node."""

from __future__ import annotations

import asyncio
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.resources.chat.completions import AsyncCompletions, Completions

from edge_node.runner import (
    AgentCall,
    Decision,
    ExplicitMarking,
    SamplingRate,
    TrainingRunner,
    agent_call,
    mark_for_training,
)
from edge_node.runner import training_runner as runner_module
from edge_node.runner.calls import endpoint_of
from tests.edge_node.runner.conftest import Served

ALWAYS = SamplingRate(1.0)
ORIGINALS = {
    (kind, name): kind.__dict__[name] for kind in (Completions, AsyncCompletions) for name in ("create", "parse")
}


def asked(text: str = "What is 23+45?", **more: Any) -> dict[str, Any]:
    return {"model": "headwater", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


@pytest.fixture
def client(site: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def unhooked() -> Iterator[None]:
    """Whatever a test does, the package is itself again afterwards."""
    yield
    for (kind, name), original in ORIGINALS.items():
        assert kind.__dict__[name] is original


def runner_for(site: Served, **settings: Any) -> TrainingRunner:
    settings = {"selection_strategy": ALWAYS, "reward_calculator": lambda call: 1.0, "commit_interval_s": 0} | settings
    return TrainingRunner(site.url, **settings)


# --- what is watched


def test_every_way_to_ask_is_watched_and_business_code_gets_the_same(site: Served, client: OpenAI) -> None:
    seen: dict[str, AgentCall] = {}

    def reward(call: AgentCall) -> float:
        (name,) = call.response_ids
        seen[name] = call
        return 0.5

    with runner_for(site, reward_calculator=reward):
        create = client.chat.completions.create
        whole = create(**asked())
        chunks = list(create(**asked(stream=True, stream_options={"include_usage": True})))
        raw = client.chat.completions.with_raw_response.create(**asked())
        raw_stream = list(client.chat.completions.with_raw_response.create(**asked(stream=True)).parse())
        ends = asked(temperature=0, max_tokens=100)  # these two helpers of the package raise where an answer is cut
        parsed = client.chat.completions.parse(**ends)
        with client.chat.completions.stream(**ends) as events:
            streamed = [e for e in events if e.type == "chunk"]
            final = events.get_final_completion()
    texts = {
        whole.id: whole.choices[0].message.content,
        chunks[0].id: "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        raw.parse().id: raw.parse().choices[0].message.content,
        raw_stream[0].id: "".join(c.choices[0].delta.content or "" for c in raw_stream if c.choices),
        parsed.id: parsed.choices[0].message.content,
        streamed[0].chunk.id: final.choices[0].message.content,
    }
    assert {name: call.text for name, call in seen.items()} == texts
    assert all(site.reward(name) == 0.5 for name in texts)
    assert all(list(call.inputs) == asked()["messages"] and call.agent is None for call in seen.values())
    assert all(call.output == call.text for call in seen.values())


def test_async_calls_and_streams_are_watched(site: Served) -> None:
    async def business() -> list[str]:
        async with AsyncOpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0) as client:
            whole = await client.chat.completions.create(**asked())
            stream = await client.chat.completions.create(**asked(stream=True))
            (streamed,) = {chunk.id async for chunk in stream}
            parsed = await client.chat.completions.parse(**asked(temperature=0, max_tokens=100))
            return [whole.id, streamed, parsed.id]

    async def main() -> list[str]:
        async with runner_for(site):
            return await business()

    assert [site.reward(name) for name in asyncio.run(main())] == [1.0] * 3


def test_calls_of_one_agent_are_one_task_however_many_run_at_once(site: Served) -> None:
    """Each call asks twice, a second time on a task of its own, and is rewarded by its own number."""

    class Agent:
        async def call(self, client: AsyncOpenAI, number: int) -> list[str]:
            with agent_call(self, number) as call:
                first = await client.chat.completions.create(**asked())
                await asyncio.sleep(random.random() / 20)
                second = await asyncio.create_task(client.chat.completions.create(**asked()))
                call.output = number
            return [first.id, second.id]

    agent, numbers = Agent(), {}

    def reward(call: AgentCall) -> float:
        assert call.agent is agent and len(call.response_ids) == 2
        numbers[call.inputs] = call.output
        return call.inputs / 10

    async def main() -> list[list[str]]:
        client = AsyncOpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0)
        async with runner_for(site, reward_calculator=reward), client:
            return await asyncio.gather(*(agent.call(client, number) for number in range(12)))

    calls = asyncio.run(main())
    tasks = set()
    for number, names in enumerate(calls):
        assert [site.reward(name) for name in names] == [number / 10] * 2
        tasks.add(frozenset(record.task_id for name in names if (record := site.record(name)) is not None))
    assert numbers == {number: number for number in range(12)}
    assert len(tasks) == 12 and all(len(task) == 1 for task in tasks)


def test_threads_do_not_meet_either(site: Served, client: OpenAI) -> None:
    def business(number: int) -> list[str]:
        with agent_call(inputs=number):
            return [client.chat.completions.create(**asked()).id for _ in range(2)]

    with runner_for(site, reward_calculator=lambda call: call.inputs / 10), ThreadPoolExecutor(4) as threads:
        calls = list(threads.map(business, range(8)))
    assert [[site.reward(name) for name in names] for names in calls] == [[n / 10] * 2 for n in range(8)]


def test_other_servers_and_other_models_are_not_watched(site: Served, client: OpenAI) -> None:
    judged: list[AgentCall] = []

    def reward(call: AgentCall) -> float:
        judged.append(call)
        return 1.0

    with runner_for(site, reward_calculator=reward, model_name="headwater/stable"):
        client.chat.completions.create(**asked())
        named = client.chat.completions.create(**{**asked(), "model": "headwater/stable"})
    with TrainingRunner("http://127.0.0.1:9", selection_strategy=ALWAYS, reward_calculator=reward, auto_commit=False):
        client.chat.completions.create(**asked())
    assert [call.response_ids for call in judged] == [[named.id]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://127.0.0.1:8010", "http://localhost:8010/v1/"),
        ("http://[::1]:8010/v1", "http://LOCALHOST:8010"),
        ("https://node.example/", "https://node.example:443/v1"),
    ],
)
def test_an_endpoint_is_the_same_however_it_is_written(one: str, other: str) -> None:
    assert endpoint_of(one) == endpoint_of(other)


def test_endpoints_differ_by_host_port_scheme_and_path() -> None:
    urls = ("http://a", "https://a", "http://a:81", "http://b", "http://a/x/v1", "http://localhost")
    assert len({endpoint_of(url) for url in urls}) == 6
    for url in ("a", "ftp://a", "http://", ""):
        with pytest.raises(ValueError, match="not an http"):
            endpoint_of(url)


# --- selection and reward


def test_what_is_not_selected_is_neither_judged_nor_recorded(site: Served, client: OpenAI) -> None:
    judged: list[AgentCall] = []

    def reward(call: AgentCall) -> float:
        judged.append(call)
        return 1.0

    with runner_for(site, selection_strategy=SamplingRate(0.0), reward_calculator=reward):
        name = client.chat.completions.create(**asked()).id
    assert judged == [] and site.record(name) is None


def test_a_strategy_may_look_at_the_call_and_its_labels_are_recorded(site: Served, client: OpenAI) -> None:
    class Short:
        def decide(self, call: AgentCall) -> Decision:
            return Decision(len(call.inputs[0]["content"]) < 12, "short", ("short-question",))

    with runner_for(site, selection_strategy=Short()):
        short = client.chat.completions.create(**asked("What is 2+3?"[:11])).id
        long = client.chat.completions.create(**asked("What is 23+45?")).id
    assert site.reward(long) is None
    record = site.record(short)
    assert record is not None and list(record.selection.labels) == ["short-question"]


def test_marked_calls_are_selected_with_labels_metadata_and_task(site: Served, client: OpenAI) -> None:
    with runner_for(site, selection_strategy=ExplicitMarking(), reward_calculator=None):
        plain = client.chat.completions.create(**asked()).id
        with mark_for_training("good", "reviewed", metadata={"channel": "chat"}, task_id="ticket-7"):
            marked = [client.chat.completions.create(**asked()).id for _ in range(2)]
    assert site.record(plain) is None
    records = [site.record(name) for name in marked]
    assert [r and r.task_id for r in records] == ["ticket-7"] * 2
    assert {r.run_id for r in records if r} == {"0", "1"}  # the same task, done twice
    assert all(r and list(r.selection.labels) == ["good", "reviewed"] for r in records)
    assert all(r and dict(r.selection.metadata) == {"channel": "chat"} for r in records)
    assert [site.reward(name) for name in marked] == [0.0] * 2  # the site's default


def test_a_reward_may_be_computed_by_a_coroutine(site: Served, client: OpenAI) -> None:
    async def reward(call: AgentCall) -> float:
        await asyncio.sleep(0)
        return 0.25

    with runner_for(site, reward_calculator=reward):
        name = client.chat.completions.create(**asked()).id
    assert site.reward(name) == 0.25


def test_one_reward_per_call(site: Served, client: OpenAI) -> None:
    counted: list[int] = []

    def reward(call: AgentCall) -> float:
        counted.append(len(call.response_ids))
        return 1.0

    with runner_for(site, reward_calculator=reward), agent_call():
        for _ in range(3):
            client.chat.completions.create(**asked())
    assert counted == [3]


# --- failures


class _Fails(SamplingRate):
    def decide(self, candidate: Any) -> Decision:
        raise RuntimeError("secret")


@pytest.mark.parametrize(
    "settings",
    [
        {"reward_calculator": lambda call: 1 / 0},
        {"reward_calculator": lambda call: float("nan")},
        {"reward_calculator": lambda call: "good"},
        {"reward_calculator": lambda call: sys.exit(1)},
        {"selection_strategy": _Fails(1.0)},
    ],
)
def test_no_failure_of_strategy_or_calculator_reaches_business_code_or_the_node(
    site: Served, client: OpenAI, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), runner_for(site, **settings):
        names = [client.chat.completions.create(**asked()).id for _ in range(6)]  # more than there are workers
    assert all(site.record(name) is None for name in names)
    assert caplog.text.count("call not judged") == 6
    assert "secret" not in caplog.text


def test_a_call_that_fails_is_not_judged_and_fails_as_before(site: Served, client: OpenAI) -> None:
    judged: list[AgentCall] = []
    with runner_for(site, reward_calculator=lambda call: judged.append(call) or 1.0):  # type: ignore[func-returns-value]
        with pytest.raises(BadRequestError):
            client.chat.completions.create(**asked(temperature=-1))
        with pytest.raises(KeyError), agent_call():
            client.chat.completions.create(**asked())
            raise KeyError("business")
        stream = client.chat.completions.create(**asked(stream=True))
        next(iter(stream))
        stream.close()  # left halfway
    assert judged == []


def test_a_node_that_is_gone_fails_nothing_but_the_log(site: Served, caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        message = {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return httpx2.Response(200, json=body)

    transport = httpx2.Client(transport=httpx2.MockTransport(answer))
    gone = "http://127.0.0.1:9"
    with (
        caplog.at_level(logging.WARNING),
        OpenAI(base_url=f"{gone}/v1", api_key="x", http_client=transport) as client,
        TrainingRunner(gone, selection_strategy=ALWAYS, reward_calculator=lambda call: 1.0) as runner,
    ):
        assert client.chat.completions.create(**asked()).id == "c1"
        started = time.monotonic()
        runner.stop()
    assert time.monotonic() - started < 10
    assert "call not judged" in caplog.text and "commit failed" in caplog.text
    assert "x" not in [record.getMessage() for record in caplog.records]


def test_a_refusal_by_the_node_is_logged_with_its_reason(
    site: Served, client: OpenAI, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.node.recorder, "was_answered", lambda *_: False)  # as if another node had answered
    with caplog.at_level(logging.WARNING), runner_for(site):
        name = client.chat.completions.create(**asked()).id
        site.node.recorder.pending.drop(name)
    assert "404" in caplog.text and "no answer of this key" in caplog.text


def test_stopping_does_not_wait_for_ever(
    site: Served, client: OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "_STOP_S", 0.3)
    stuck = threading.Event()
    before = site.node.commits.count
    with caplog.at_level(logging.WARNING), runner_for(site, reward_calculator=lambda call: stuck.wait(20) and 1.0):
        client.chat.completions.create(**asked())
        started = time.monotonic()
    stuck.set()
    assert time.monotonic() - started < 5
    assert site.node.commits.count == before + 1  # the final commit comes all the same
    assert "calls left out" in caplog.text


def test_what_was_taken_is_judged_before_the_end(site: Served, client: OpenAI) -> None:
    def slow(call: AgentCall) -> float:
        time.sleep(0.1)
        return 1.0

    with runner_for(site, reward_calculator=slow, workers=2):
        names = [client.chat.completions.create(**asked()).id for _ in range(8)]
    assert [site.reward(name) for name in names] == [1.0] * 8


def test_too_many_waiting_calls_are_left_out_and_nobody_waits(
    site: Served, client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    with (
        caplog.at_level(logging.WARNING),
        runner_for(site, reward_calculator=lambda call: go_on.wait(20) and 1.0, workers=1, capacity=2),
    ):
        names = [client.chat.completions.create(**asked()).id for _ in range(6)]
        go_on.set()
    assert 2 <= sum(site.reward(name) == 1.0 for name in names) <= 3
    assert "too many wait" in caplog.text


# --- commits, start and stop


def commits_during(site: Served, seconds: float, **settings: Any) -> int:
    before = site.node.commits.count
    with runner_for(site, **settings):
        time.sleep(seconds)
    return site.node.commits.count - before


def test_commits_come_in_intervals_and_at_the_end(site: Served) -> None:
    assert commits_during(site, 1.0, commit_interval_s=0.2) >= 3
    assert commits_during(site, 0.3, commit_interval_s=0) == 1
    assert commits_during(site, 0.3, commit_interval_s=-5) == 1
    assert commits_during(site, 0.3, commit_interval_s=0.1, auto_commit=False) == 0


def test_a_commit_follows_the_feedback_it_is_about(site: Served, client: OpenAI) -> None:
    with runner_for(site):
        name = client.chat.completions.create(**asked()).id
    record = site.record(name)
    assert record is not None and record.committed_at_s > 0
    before = site.node.commits.count
    TrainingRunner(site.url).commit()
    assert site.node.commits.count == before + 1


def test_it_starts_once_stops_once_and_starts_again(site: Served, client: OpenAI) -> None:
    runner = runner_for(site)
    runner.stop()
    assert not runner.running
    runner.start()
    runner.start()
    assert runner.running
    first = client.chat.completions.create(**asked()).id
    runner.stop()
    runner.stop()
    between = client.chat.completions.create(**asked()).id
    with runner:
        last = client.chat.completions.create(**asked()).id
    assert [site.reward(name) for name in (first, between, last)] == [1.0, None, 1.0]


def test_two_runners_see_the_same_call_and_both_let_go(site: Served, client: OpenAI) -> None:
    other: list[AgentCall] = []

    def second(call: AgentCall) -> float:
        other.append(call)
        return 1.0

    with runner_for(site), runner_for(site, reward_calculator=second):
        name = client.chat.completions.create(**asked()).id
    assert [call.response_ids for call in other] == [[name]]
    assert site.reward(name) == 1.0


def test_the_settings_have_the_sources_defaults() -> None:
    runner = TrainingRunner()
    assert runner.endpoint == "http://localhost:8010"
    assert (runner._commit_interval_s, runner._api_key, runner._timeout_s) == (300.0, "dummy", 300.0)
    assert runner._auto_commit
    assert isinstance(runner._strategy, SamplingRate) and runner._strategy.rate == 0.1
    for wrong in ({"endpoint": "node"}, {"timeout_s": 0}, {"workers": 0}, {"commit_interval_s": float("nan")}):
        with pytest.raises(ValueError):
            TrainingRunner(**wrong)  # type: ignore[arg-type]


def test_no_training_or_serving_stack_comes_with_it() -> None:
    heavy = "torch onnxruntime transformers fastapi flwr opacus agentscope numpy"
    code = f"import sys, edge_node.runner; print([m for m in {heavy.split()} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
