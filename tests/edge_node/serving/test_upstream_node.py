"""Whole nodes in front of a model server: one like vLLM, and another node of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import OpenAI

from common.adapter import Adapter
from common.errors import ConfigError, TrustError
from common.identity import write_private
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine
from common.inference.model_folder import ModelFolder
from common.tasks import math as task
from deploy.settings import TrainingSettings
from deploy.users import ask_all
from deploy.world import World
from edge_node.config import EdgeConfig, EngineSettings, UpstreamSettings
from edge_node.node import EdgeNode
from tests.edge_node.adopting.test_adopt import publish_canary
from tests.edge_node.agent.scripted import serving
from tests.edge_node.serving.vllm_stub import BASE, KEY, Vllm, vllm

ASK: dict[str, Any] = {
    "model": "headwater",
    "messages": [{"role": "user", "content": "What is 23+45?"}],
    "max_tokens": 30,
}


@pytest.fixture(scope="module")
def _running(model: ModelFolder, tokenizer: ChatTokenizer, start: Adapter) -> Iterator[tuple[Vllm, str]]:
    state, app = vllm(Engine(model, slots=4, context_tokens=512, threads=1), tokenizer, start)
    with serving(app) as url:
        yield state, f"{url}/v1"
    state.service.batcher.close()


@pytest.fixture
def server(_running: tuple[Vllm, str]) -> Vllm:
    _running[0].reset()
    return _running[0]


def behind(config: EdgeConfig, tmp_path: Path, **upstream: Any) -> EdgeConfig:
    key = tmp_path / "upstream.key"
    if not key.exists():
        write_private(key, f"{KEY}\n".encode())
    settings = UpstreamSettings(**{"model": BASE, "key_file": key, "logprobs": "processed", **upstream})
    return config.model_copy(update={"engine": EngineSettings(kind="upstream", upstream=settings)})


@pytest.fixture
def front(world: World, _running: tuple[Vllm, str], server: Vllm, tmp_path: Path) -> Iterator[EdgeNode]:
    node = EdgeNode(behind(world.setups[0].config, tmp_path, base_url=_running[1]), clock=world.clock)
    node.look_again()
    yield node
    node.close()


def test_a_node_routes_and_records_what_a_model_server_answers(front: EdgeNode, server: Vllm, tmp_path: Path) -> None:
    http = TestClient(front.app)
    answer = http.post("/v1/chat/completions", json={**ASK, "seed": 3, "user": "jane"})
    assert answer.status_code == 200
    assert answer.headers["x-headwater-version"] == "v0"
    assert server.asked("chat")[-1]["model"] == BASE  # v0 changes nothing
    assert "jane" not in str(server.calls)
    (record,) = front.store.read(after_s=0, until_s=4e9)
    assert record.model_version == "v0"
    assert len(record.completion_token_ids) == len(record.logprobs) > 0
    assert record.messages[-1].content == answer.json()["choices"][0]["message"]["content"]
    assert http.get("/healthz").json()["provider"] == "upstream"
    server.failing = [500]
    failed = http.post("/v1/chat/completions", json=ASK)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "generation_failed"
    assert KEY not in failed.text
    server.failing = [429]
    busy = http.post("/v1/chat/completions", json=ASK)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert len(list(front.store.read(after_s=0, until_s=4e9))) == 1


def test_records_train_as_far_as_the_server_tells_how_likely_they_were(
    world: World, server: Vllm, _running: tuple[Vllm, str], tmp_path: Path
) -> None:
    """With token ids and log-probabilities like a node's own; without them for DPO and not for PPO."""

    def units(config: EdgeConfig) -> dict[str, tuple[int, int]]:
        node = EdgeNode(config, clock=world.clock)
        node.look_again()
        ask_all(node.app, [task.Problem(20 + i, "+", 31) for i in range(16)], model="headwater", answers=2, seed=0)
        found = {kind: node.dataset(TrainingSettings().plan(kind)) for kind in ("dpo", "ppo")}
        node.close()
        return {kind: (len(d.units), d.left_out.get("no log-probabilities", 0)) for kind, d in found.items()}

    own = units(world.setups[0].config)
    like_own = units(behind(world.setups[1].config, tmp_path, base_url=_running[1]))
    plain = units(behind(world.setups[2].config, tmp_path, base_url=_running[1], kind="openai"))
    assert own["dpo"][0] > 0
    assert own["ppo"][0] > 0
    assert like_own == own
    assert plain["dpo"][0] > 0
    assert plain["ppo"] == (0, own["ppo"][0])


def test_a_canary_is_adopted_probed_and_replayed_like_in_a_node_of_its_own(
    world: World, front: EdgeNode, server: Vllm
) -> None:
    version = publish_canary(world, seed=1)
    front.look_again()
    canary = front.router.arms.canary
    assert canary is not None
    assert canary.adapter.digest == world.hub.adapter(version).digest
    assert list(server.loras) == [f"headwater-site-1-{canary.adapter.digest[:16]}"]
    assert [r.matches for r in front.probe.run()] == [True, True, True]  # the base is still in memory

    own = EdgeNode(world.setups[1].config, clock=world.clock)
    own.look_again()
    prompts = [task.Problem(23, "+", 45).prompt, task.Problem(77, "-", 31).prompt]
    asked = {"canary_id": version, "control_id": "v0", "task": "math", "seed": 1}
    assert front.replay_golden(prompts, **asked) == own.replay_golden(prompts, **asked)
    own.close()
    assert list(front.store.read(after_s=0, until_s=4e9)) == []


def test_a_canary_the_server_does_not_apply_is_not_adopted(
    world: World, front: EdgeNode, server: Vllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.ignores_adapters = True
    publish_canary(world)
    before = front.router.arms
    front.look_again()
    assert front.router.arms == before
    assert "exactly as without it" in caplog.text
    server.ignores_adapters = False
    front.look_again()  # it is tried again
    assert front.router.arms.canary is not None


def test_a_server_that_restarts_goes_on_with_its_versions(world: World, front: EdgeNode, server: Vllm) -> None:
    version = publish_canary(world)
    front.look_again()
    ask = {**ASK, "model": f"headwater/{version}", "temperature": 0}
    http = TestClient(front.app)
    before = http.post("/v1/chat/completions", json=ask).json()["choices"]
    server.restart()
    again = http.post("/v1/chat/completions", json=ask)
    assert again.json()["choices"] == before
    assert again.headers["x-headwater-version"] == version
    server.restart()
    front.probe_all()
    assert len(server.loras) == 1
    assert http.get("/readyz").status_code == 200


def test_a_node_starts_before_its_server_and_follows_when_it_comes(
    world: World, _running: tuple[Vllm, str], server: Vllm, tmp_path: Path
) -> None:
    publish_canary(world)
    config = behind(world.setups[0].config, tmp_path, base_url=_running[1])
    first = EdgeNode(config, clock=world.clock)
    first.look_again()
    first.close()
    server.restart()
    server.key = "another key, so that nobody is let in, as if it was not up"  # the address stays the same
    with pytest.raises(ConfigError, match="key_file"):
        EdgeNode(config, clock=world.clock)
    nobody = behind(world.setups[0].config, tmp_path, base_url="http://127.0.0.1:9/v1")
    waiting = EdgeNode(nobody, clock=world.clock)
    waiting.probe_all()
    assert waiting.router.arms.stable.id == "base"
    assert waiting.router.arms.canary is None
    assert TestClient(waiting.app).get("/readyz").status_code == 503
    assert "cannot be reached" in TestClient(waiting.app).post("/v1/chat/completions", json=ASK).text
    waiting.close()
    server.key = KEY
    again = EdgeNode(config, clock=world.clock)
    assert again.router.arms.canary is not None
    again.close()


def test_a_node_in_front_of_another_node_of_ours(world: World, tmp_path: Path) -> None:
    """Any server with OpenAI's API: no token ids and no adapters, the rest goes through."""
    back = EdgeNode(world.setups[1].config, clock=world.clock)
    back.look_again()
    with serving(back.app) as url:
        settings = {"model": "headwater", "key_file": None, "kind": "openai", "base_url": f"{url}/v1"}
        node = EdgeNode(behind(world.setups[0].config, tmp_path, **settings), clock=world.clock)
        node.look_again()
        with serving(node.app) as front, OpenAI(base_url=f"{front}/v1", api_key="x", max_retries=0) as client:
            ask = {**ASK, "seed": 5}
            with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as direct:
                expected = direct.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
            got = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
            assert got.choices == expected.choices
            assert got.usage == expected.usage
            assert got.id != expected.id
            chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == expected.choices[0].message.content
            assert chunks[-1].usage == expected.usage
        records = list(node.store.read(after_s=0, until_s=4e9))
        assert len(records) == 2
        for record in records:
            assert record.completion_token_ids  # by our own tokenizer
            assert not record.logprobs  # so nothing that needs them is trained on
        publish_canary(world)
        node.look_again()
        assert node.router.arms.canary is None  # this kind of server cannot load it
        assert node.router.arms.stable.id == "v0"
        node.close()
    back.close()


@pytest.mark.parametrize(
    ("upstream", "told"),
    [
        ({"base_url": "ftp://host/v1"}, "http"),
        ({"base_url": "http://host:8000"}, "ends in /v1"),
        ({"base_url": "http://user:secret@host/v1"}, "key_file"),
        ({"base_url": "http://host/v1?key=x"}, "http"),
    ],
)
def test_addresses_that_cannot_work_are_refused(upstream: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        UpstreamSettings(model="m", **upstream)


def test_settings_that_do_not_fit_together_are_refused(
    world: World, _running: tuple[Vllm, str], server: Vllm, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"engine\.upstream is needed"):
        EngineSettings(kind="upstream")
    with pytest.raises(ValueError, match=r"engine\.upstream is needed"):
        EngineSettings(upstream=UpstreamSettings(model="m", base_url="http://h/v1"))
    config, url = world.setups[0].config, _running[1]
    with pytest.raises(ConfigError, match="does not serve"):
        EdgeNode(behind(config, tmp_path, base_url=url, model="other"), clock=world.clock)
    with pytest.raises(ConfigError, match="cannot be read"):
        EdgeNode(behind(config, tmp_path, base_url=url, key_file=tmp_path / "none"), clock=world.clock)
    open_key = tmp_path / "open.key"
    open_key.write_text(KEY)
    open_key.chmod(0o644)
    with pytest.raises(TrustError, match="chmod 600"):
        EdgeNode(behind(config, tmp_path, base_url=url, key_file=open_key), clock=world.clock)
    two = tmp_path / "two.key"
    write_private(two, json.dumps([KEY, KEY]).encode())
    with pytest.raises(ConfigError, match="one key"):
        EdgeNode(behind(config, tmp_path, base_url=url, key_file=two), clock=world.clock)
