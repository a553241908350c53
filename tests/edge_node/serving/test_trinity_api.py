"""The training contract over HTTP: with Trinity's client as it is, and with messages nobody should send."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import threading
from collections.abc import Iterator
from importlib.metadata import files
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from deploy.settings import TrainingSettings
from deploy.world import World
from edge_node.node import EdgeNode
from edge_node.serving.keys import CHAT, FEEDBACK
from tests.edge_node.loopback import opened, served

ASK: dict[str, Any] = {
    "model": "headwater",
    "messages": [{"role": "user", "content": "What is 23+45?"}],
    "max_tokens": 12,
}


def trinity_client(url: str) -> Any:
    """The client class of the trinity-rft package, from its file: the package around it needs Ray and more."""
    (file,) = [f for f in files("trinity-rft") or () if str(f).endswith("trinity/explorer/proxy/client.py")]
    spec = importlib.util.spec_from_file_location("trinity_client", file.locate())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TrinityClient(url)


@pytest.fixture
def url(node: EdgeNode) -> Iterator[str]:
    with served(node.app) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url) as client:
        yield client


def ask(url: str, **more: Any) -> ChatCompletion:
    with OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        completion: ChatCompletion = client.chat.completions.create(**{**ASK, **more})
        return completion


def rewards(node: EdgeNode) -> dict[str, list[float]]:
    records = node.store.read(after_s=0, until_s=4e9)
    return {t.id: [r.value for r in t.rewards if r.source == "feedback"] for t in records}


# --- Trinity's client


def test_trinitys_client_as_it_is_asks_rewards_and_commits(node: EdgeNode, url: str) -> None:
    client = trinity_client(url)
    assert client.alive()
    with client.get_openai_client() as openai:
        whole = openai.chat.completions.create(**ASK)
        chunks = list(openai.chat.completions.create(**ASK, stream=True))
    ids = [whole.id, chunks[0].id]
    assert len({chunk.id for chunk in chunks}) == 1
    assert client.feedback(0.75, ids) == {"status": "success"}
    assert client.feedback(0.75, ids) == {"status": "success"}  # a retry
    assert client.commit() == {"status": "success"}

    records = list(node.store.read(after_s=0, until_s=4e9))
    assert {t.id for t in records} == set(ids)
    assert rewards(node) == {name: [0.75] for name in ids}
    assert {t.task_id for t in records} == {client.task_id}
    assert all(t.committed_at_s for t in records)
    assert node.commits.count == 1


def test_trinitys_async_client_as_it_is(node: EdgeNode, url: str) -> None:
    client = trinity_client(url)

    async def talk() -> str:
        async with client.get_openai_async_client() as openai:
            stream = await openai.chat.completions.create(**ASK, stream=True)
            ids = {chunk.id async for chunk in stream}
            (name,) = ids
        assert await client.feedback_async(1, [name]) == {"status": "success"}
        assert await client.commit_async() == {"status": "success"}
        return str(name)

    name = asyncio.run(talk())
    assert rewards(node) == {name: [1.0]}


def test_trinitys_client_asks_for_any_kind_of_metrics_and_cannot_read_prometheus(url: str) -> None:
    """It sends what curl sends, so the node cannot tell that it wants JSON; where it says so it is given JSON."""
    with pytest.raises(ValueError, match="Expecting value"):
        trinity_client(url).get_metrics()
    found = httpx2.get(f"{url}/metrics", headers={"accept": "application/json"}).json()
    assert found['headwater_version_info{adapter_digest="%s",arm="stable",version="v0"}' % digest(url)] == 1  # noqa: UP031


def digest(url: str) -> str:
    return str(httpx2.get(f"{url}/readyz").json()["adapter_digest"])


def test_trinitys_client_learns_what_was_wrong(node: EdgeNode, url: str) -> None:
    client = trinity_client(url)
    refused = client.feedback(1.0, ["chatcmpl-unknown"])
    assert refused["error"]["code"] == "response_not_found"
    assert "chatcmpl-unknown" in refused["error"]["message"]


def test_agentscopes_java_client_writes_null_for_what_is_absent(node: EdgeNode, http: httpx2.Client) -> None:
    """Its messages as its mapper writes them; they carry no Authorization."""
    name = ask(str(http.base_url)).id
    said = {"msg_ids": [name], "reward": 0.5, "task_id": "t1", "run_id": "r1"}
    assert http.post("/feedback", json=said).json() == {"status": "success"}
    nothing = {"task_id": None, "run_id": None, "time_threshold": None}
    assert http.post("/commit", json=nothing).json() == {"status": "success"}
    (record,) = node.store.read(after_s=0, until_s=4e9)
    assert (record.task_id, record.run_id) == ("t1", "r1") and record.committed_at_s


def test_a_rewarded_answer_is_what_a_round_would_train_on(node: EdgeNode, http: httpx2.Client) -> None:
    plan = TrainingSettings().plan("rft")
    name = ask(str(http.base_url), messages=[{"role": "user", "content": "Say something."}]).id
    before = node.dataset(plan)
    assert (len(before.units), before.left_out) == (0, {"no reward": 1})
    assert http.post("/feedback", json={"msg_ids": [name], "reward": 1.25}).status_code == 200
    (unit,) = node.dataset(plan).units
    assert unit.examples[0][0].reward == 1.25


# --- choices, selection


def test_a_response_id_means_all_choices_also_of_streams(node: EdgeNode, http: httpx2.Client) -> None:
    url = str(http.base_url)
    name = ask(url, n=2, seed=1).id
    with OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        (streamed,) = {chunk.id for chunk in client.chat.completions.create(**ASK, n=2, stream=True)}
    assert http.post("/feedback", json={"msg_ids": [name], "reward": 1}).status_code == 200
    assert http.post("/feedback", json={"msg_ids": [f"{streamed}-1"], "reward": 0.5}).status_code == 200
    assert rewards(node) == {f"{name}-0": [1], f"{name}-1": [1], f"{streamed}-0": [], f"{streamed}-1": [0.5]}


def test_what_waits_for_feedback_is_recorded_when_it_comes(world: World) -> None:
    with opened(world, selection="feedback") as node, served(node.app) as url, httpx2.Client(base_url=url) as http:
        first, second = ask(url), ask(url)
        assert rewards(node) == {}
        said = {"msg_ids": [first.id], "reward": 9, "labels": ["judged"], "run_id": 0}
        assert http.post("/feedback", json=said).json() == {"status": "success"}
        assert rewards(node) == {first.id: [5.0]}
        assert http.post("/mark", json={"msg_ids": [second.id], "labels": ["good"]}).json() == {"status": "success"}
        by_id = {t.id: t for t in node.store.read(after_s=0, until_s=4e9)}
        assert (by_id[first.id].selection.reason, list(by_id[first.id].selection.labels)) == ("feedback", ["judged"])
        assert by_id[first.id].run_id == "0"
        assert by_id[second.id].selection.reason == "explicit-marking"


def test_requests_are_marked_by_header_or_metadata(world: World) -> None:
    with opened(world, selection="explicit-marking") as node, served(node.app) as url:
        ask(url)
        header = json.dumps({"labels": ["good"], "metadata": {"channel": "chat"}, "task_id": "t1"})
        by_header = ask(url, extra_headers={"x-headwater-mark": header})
        by_metadata = ask(url, metadata={"headwater_mark": "good, reviewed", "task_id": "t2", "channel": "mail"})
        records = {t.id: t for t in node.store.read(after_s=0, until_s=4e9)}
        assert set(records) == {by_header.id, by_metadata.id}
        found = [(records[c.id].task_id, list(records[c.id].selection.labels)) for c in (by_header, by_metadata)]
        assert found == [("t1", ["good"]), ("t2", ["good", "reviewed"])]
        assert dict(records[by_header.id].selection.metadata) == {"channel": "chat"}
        assert dict(records[by_metadata.id].selection.metadata) == {"channel": "mail"}
        with httpx2.Client(base_url=url) as http:
            bad = http.post("/v1/chat/completions", json=ASK, headers={"x-headwater-mark": "{"})
            assert bad.status_code == 400 and "x-headwater-mark" in bad.text


def test_an_answer_that_is_not_selected_takes_feedback_without_a_trace(world: World) -> None:
    with opened(world, selection_rate=0.0) as node, served(node.app) as url, httpx2.Client(base_url=url) as http:
        name = ask(url).id
        assert http.post("/feedback", json={"msg_ids": [name], "reward": 1}).json() == {"status": "success"}
        assert list((node._config.data_dir / "trajectories").iterdir()) == []


def test_commit_wakes_the_scheduler_and_starts_no_training(node: EdgeNode, http: httpx2.Client) -> None:
    ask(str(http.base_url))
    woken = threading.Event()

    def scheduler() -> None:
        if node.commits.wait(0, timeout_s=20) == 1:
            woken.set()

    waiting = threading.Thread(target=scheduler, daemon=True)
    waiting.start()
    charged = node.training.ledger_head
    assert http.post("/commit").json() == {"status": "success"}
    assert woken.wait(20)
    assert list(node.training.updates._folder.glob("*.safetensors")) == []
    assert node.training.ledger_head == charged


# --- refusals

BAD_FEEDBACK = [
    {},
    {"reward": 1.0},
    {"msg_ids": None, "reward": 1.0},
    {"msg_ids": "chatcmpl-1", "reward": 1.0},
    {"msg_ids": [], "reward": 1.0},
    {"msg_ids": [1], "reward": 1.0},
    {"msg_ids": [None], "reward": 1.0},
    {"msg_ids": ["x" * 1000], "reward": 1.0},
    {"msg_ids": ["x"] * 1000, "reward": 1.0},
    {"msg_ids": ["\ud800"], "reward": 1.0},
    {"msg_ids": ["ID"], "reward": "1.0"},
    {"msg_ids": ["ID"], "reward": True},
    {"msg_ids": ["ID"], "reward": [1.0]},
    {"msg_ids": ["ID"], "reward": math.nan},
    {"msg_ids": ["ID"], "reward": math.inf},
    {"msg_ids": ["ID"], "reward": -math.inf},
    {"msg_ids": ["ID"], "reward": 10**400},
    {"msg_ids": ["ID"], "rewards": 1.0},
    {"msg_ids": ["ID"], "reward": 1.0, "task_id": 5},
    {"msg_ids": ["ID"], "reward": 1.0, "task_id": "x" * 1000},
    {"msg_ids": ["ID"], "reward": 1.0, "run_id": 1.5},
    {"msg_ids": ["ID"], "reward": 1.0, "labels": ["x" * 100]},
    {"msg_ids": ["ID"], "rating": 2},
    {"msg_ids": ["ID"], "rating": "up"},
    {"msg_ids": ["ID"], "rating": True},
    {"msg_ids": ["ID"], "rating": math.nan},
    {"msg_ids": ["ID"], "rating": 1, "reward": 1},
    {"msg_ids": ["ID"], "rating": 1, "labels": ["good"]},
]
BAD_COMMIT = [
    {"time_threshold": "now"},
    {"time_threshold": -1},
    {"time_threshold": math.nan},
    {"task_id": 1},
    {"task": "t"},
    [],
    "commit",
]
BAD_MARK = [
    {"labels": ["good"]},
    {"msg_ids": ["ID"], "labels": "good"},
    {"msg_ids": ["ID"], "metadata": {"a b": "x"}},
    {"msg_ids": ["ID"], "metadata": {"a": 1}},
]


@pytest.mark.parametrize(
    ("path", "messages"), [("/feedback", BAD_FEEDBACK), ("/commit", BAD_COMMIT), ("/mark", BAD_MARK)]
)
def test_a_bad_message_is_an_openai_error_and_changes_nothing(
    node: EdgeNode, http: httpx2.Client, path: str, messages: list[Any]
) -> None:
    name = ask(str(http.base_url)).id
    before = [t.SerializeToString(deterministic=True) for t in node.store.read(after_s=0, until_s=4e9)]
    for message in messages:
        content = json.dumps(message).replace('"ID"', json.dumps(name))
        response = http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, message
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, message
    after = [t.SerializeToString(deterministic=True) for t in node.store.read(after_s=0, until_s=4e9)]
    assert after == before
    assert node.commits.count == 0
    assert http.post("/feedback", json={"msg_ids": [name], "reward": 1}).status_code == 200


def test_a_body_that_is_no_json_object_is_a_400(http: httpx2.Client) -> None:
    for body in (b"{", b"\xff", b"null", b"[" * 5000, b'{"msg_ids": ["a"], "reward": 1'):
        response = http.post("/feedback", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_ids_and_another_reward_are_refused_whole(node: EdgeNode, http: httpx2.Client) -> None:
    first, second = ask(str(http.base_url)).id, ask(str(http.base_url)).id
    unknown = http.post("/feedback", json={"msg_ids": [first, "chatcmpl-0"], "reward": 1})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "msg_ids")
    assert http.post("/feedback", json={"msg_ids": [first], "reward": 1}).status_code == 200
    other = http.post("/feedback", json={"msg_ids": [second, first], "reward": 0})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "reward_already_given")
    assert rewards(node) == {first: [1.0], second: []}


def test_without_a_policy_feedback_is_refused(world: World, node: EdgeNode, http: httpx2.Client) -> None:
    name = ask(str(http.base_url)).id
    world.setups[0].config.policy.unlink()
    for path, said in (("/feedback", {"msg_ids": [name]}), ("/mark", {"msg_ids": [name]}), ("/commit", {})):
        refused = http.post(path, json=said)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "collecting_not_allowed")
        assert str(world.setups[0].config.policy) not in refused.text
    assert http.get("/health").json() == {"status": "success"}


def test_a_key_speaks_about_its_own_answers_only_and_needs_the_scope(node: EdgeNode, url: str) -> None:
    one, two = (node.keys.add(name, [CHAT, FEEDBACK], now_s=0) for name in ("app-1", "app-2"))
    chat_only = node.keys.add("app-3", [CHAT], now_s=0)
    with OpenAI(base_url=f"{url}/v1", api_key=one, max_retries=0) as client:
        name = client.chat.completions.create(**ASK).id

    def say(path: str, key: str | None, **said: Any) -> int:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        return httpx2.post(f"{url}{path}", json=said, headers=headers).status_code

    about = {"msg_ids": [name], "reward": 1.0}
    assert say("/feedback", None, **about) == say("/commit", None) == 401
    assert say("/feedback", chat_only, **about) == say("/commit", chat_only) == say("/mark", chat_only, **about) == 403
    assert say("/feedback", two, **about) == say("/mark", two, msg_ids=[name]) == 404
    assert say("/commit", two) == 200
    (record,) = node.store.read(after_s=0, until_s=4e9)
    assert record.key_id == "app-1" and not record.committed_at_s and rewards(node) == {name: []}
    assert say("/feedback", one, **about) == say("/commit", one) == 200
    (record,) = node.store.read(after_s=0, until_s=4e9)
    assert record.committed_at_s and rewards(node) == {name: [1.0]}
    assert httpx2.get(f"{url}/health").status_code == 200  # needs no key


def test_thumbs_over_http_are_what_bco_learns_from(node: EdgeNode, url: str, http: httpx2.Client) -> None:
    names = [ask(url, temperature=1, n=2, user="ann").id for _ in range(3)]
    for name, thumbs in zip(names, ([1], [-1], [1, -1, 1]), strict=True):
        for thumb in thumbs:
            message = {"msg_ids": [name], "rating": thumb, "reward": None}
            assert http.post("/feedback", json=message).json() == {"status": "success"}
    assert http.post("/feedback", json={"msg_ids": [f"{names[0]}-1"], "rating": -1}).status_code == 200
    records = {t.id: t for t in node.store.read(after_s=0, until_s=4e9)}
    assert {name: [f.rating for f in t.feedback] for name, t in records.items()} == {
        f"{names[0]}-0": [1], f"{names[0]}-1": [-1], f"{names[1]}-0": [-1], f"{names[1]}-1": [-1],
        f"{names[2]}-0": [1], f"{names[2]}-1": [1],
    }  # fmt: skip
    found = node.dataset(TrainingSettings().plan("bco"))
    assert sorted(unit.examples[0][0].reward for unit in found.units) == [-1, -1, -1, 1, 1, 1]
