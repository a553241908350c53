"""The agent and its page over HTTP: a real node in front of a model that follows a script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from common.errors import ConfigError
from common.identity import write_private
from deploy.world import World
from edge_node.agent.settings import AgentSettings, McpSettings
from edge_node.collecting.tool_durations import METADATA_KEY
from edge_node.config import EdgeConfig, EngineSettings, UpstreamSettings
from edge_node.node import EdgeNode
from tests.edge_node.agent.scripted import Refuses, Says, Script, serving

RAN: list[tuple[int, int]] = []
MEANWHILE: list[Callable[[], None]] = []


def add(x: int, y: int) -> int:
    """Add two numbers."""
    RAN.append((x, y))
    for act in MEANWHILE:
        act()
    return x + y


def with_agent(config: EdgeConfig, script: Script, **agent: Any) -> EdgeConfig:
    """A node whose answers are those of the script, recorded as its policy says."""
    upstream = UpstreamSettings(base_url=script.url, model="m", kind="openai")
    engine = EngineSettings(kind="upstream", upstream=upstream)
    return config.model_copy(update={"engine": engine, "agent": AgentSettings(**agent)})


@pytest.fixture
def node(world: World, script: Script) -> Iterator[EdgeNode]:
    tools = (f"{__name__}:add",)
    node = EdgeNode(with_agent(world.setups[0].config, script, tools=tools, system="Be brief."), clock=world.clock)
    RAN.clear()
    yield node
    node.close()


@pytest.fixture
def url(node: EdgeNode) -> Iterator[str]:
    with serving(node.app) as url:
        yield url


def turn(url: str, messages: list[dict[str, Any]], **headers: str) -> list[dict[str, Any]]:
    response = httpx2.post(f"{url}/agent/chat", json={"messages": messages}, headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]


def test_a_turn_with_tools_runs_them_once_and_is_recorded_with_their_durations(
    node: EdgeNode, url: str, script: Script
) -> None:
    script.calls(("c1", "add", '{"x": 2, "y": 3}'))
    script.says("It is 5.")
    events = turn(url, [{"role": "user", "content": "What is 2+3?"}], **{"x-headwater-conversation": "abc"})
    assert [e["type"] for e in events] == ["call", "result", "text", "text", "text", "done"]
    assert RAN == [(2, 3)]
    call, result, done = events[0], events[1], events[-1]
    assert (call["name"], call["arguments"]) == ("add", '{"x": 2, "y": 3}')
    assert (result["status"], result["result"]) == ("ok", "5")
    assert (done["ended"], done["version"], done["arm"]) == ("answer", "base", "stable")
    assert [m["role"] for m in done["messages"]] == ["assistant", "tool", "assistant"]
    assert len(done["response_ids"]) == 2

    first, second = sorted(node.store.read(after_s=0, until_s=4e9), key=lambda r: len(r.messages))
    assert [first.id, second.id] == done["response_ids"]
    assert [m.role for m in second.messages] == ["system", "user", "assistant", "tool", "assistant"]
    (recorded,) = second.messages[2].tool_calls
    assert (recorded.name, recorded.arguments, recorded.result) == ("add", '{"x": 2, "y": 3}', "5")
    assert recorded.duration_s == pytest.approx(result["duration_s"], abs=1e-3)
    assert first.conversation_id == second.conversation_id
    assert METADATA_KEY not in str(script.requests)  # the node keeps it to itself

    script.says("Yes.")
    again = turn(
        url, [{"role": "user", "content": "What is 2+3?"}, *done["messages"], {"role": "user", "content": "Sure?"}]
    )
    assert again[-1]["type"] == "done"
    assert [m["role"] for m in script.requests[-1]["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "user"
    ]  # fmt: skip


def test_who_asks_reaches_the_record_and_nothing_else_of_it(node: EdgeNode, url: str, script: Script) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    for user in ({"user": "ann"}, {"user": "bob"}, {"user": "ann"}, {}, {"user": None}, {"user": ""}):
        script.says("Hello.")
        assert httpx2.post(f"{url}/agent/chat", json={**asked, **user}, timeout=30).status_code == 200
    ann, bob, again, *nobody = (r.user_pseudonym for r in node.store.read(after_s=0, until_s=4e9))
    assert len(ann) == len(bob) == 32
    assert ann == again != bob
    assert nobody == [b"", b"", b""]
    for wrong in ("x" * 257, 7, ["ann"]):
        assert httpx2.post(f"{url}/agent/chat", json={**asked, "user": wrong}, timeout=30).status_code == 400
    half = '{"messages": [{"role": "user", "content": "Hi"}], "user": "\\ud800"}'
    sent = httpx2.post(f"{url}/agent/chat", content=half, headers={"content-type": "application/json"}, timeout=30)
    assert sent.status_code == 400


def test_a_turn_that_was_let_in_ends_also_while_the_node_stops(
    node: EdgeNode, url: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.calls(("c1", "add", '{"x": 2, "y": 3}'))
    script.says("It is 5.")
    gate = node.app.state.gate
    monkeypatch.setitem(globals(), "MEANWHILE", [lambda: setattr(gate, "draining", True)])
    assert turn(url, [{"role": "user", "content": "What is 2+3?"}])[-1]["ended"] == "answer"
    ask = {"model": "headwater", "messages": [{"role": "user", "content": "hi"}]}
    for headers in ({}, {"x-headwater-turn": ""}, {"x-headwater-turn": "guessed"}):  # but nobody else is let in
        assert httpx2.post(f"{url}/v1/chat/completions", json=ask, headers=headers).status_code == 503
    assert gate.open_requests == 0


def test_answers_stream(url: str, script: Script) -> None:
    script.then(Says("one two three four", pause_s=0.1))
    started, times = time.monotonic(), []
    with httpx2.stream("POST", f"{url}/agent/chat", json={"messages": [{"role": "user", "content": "x"}]}) as response:
        for line in response.iter_lines():
            if '"text"' in line:
                times.append(time.monotonic() - started)
    assert len(times) >= 4
    assert times[-1] - times[0] > 0.2


def test_what_the_model_fails_of_is_an_event(url: str, script: Script) -> None:
    script.calls(("c1", "add", '{"x": 1, "y": 1}'))
    script.then(*[Refuses(500)] * 2)  # the agent's client asks once more
    events = turn(url, [{"role": "user", "content": "x"}])
    assert events[-1]["type"] == "error"
    assert "500" in events[-1]["message"]
    assert [m["role"] for m in events[-1]["messages"]] == ["assistant", "tool"]


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": []}, {"messages": [{"role": "user"}]}, {"messages": "x"}, {"messages": [], "more": 1},
     {"messages": [{"role": "root", "content": "x"}]}, {"messages": [{"role": "user", "content": "\ud83d"}]}],
)  # fmt: skip
def test_bad_requests_are_refused(url: str, body: Any) -> None:
    response = httpx2.post(f"{url}/agent/chat", content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_the_agent_speaks_with_its_callers_key(node: EdgeNode, url: str, script: Script) -> None:
    mine, other = (node.keys.add(name, scopes, now_s=1) for name, scopes in (("me", ["chat"]), ("other", ["feedback"])))
    assert httpx2.get(f"{url}/chat").status_code == 200  # the page is for everybody
    ask = {"messages": [{"role": "user", "content": "x"}]}
    assert httpx2.post(f"{url}/agent/chat", json=ask).status_code == 401
    assert httpx2.get(f"{url}/agent/tools").status_code == 401
    refused = httpx2.post(f"{url}/agent/chat", json=ask, headers={"authorization": f"Bearer {other}"})
    assert refused.status_code == 403
    script.says("ok")
    assert turn(url, ask["messages"], authorization=f"Bearer {mine}")[-1]["type"] == "done"
    (record,) = node.store.read(after_s=0, until_s=4e9)
    assert record.key_id == "me"
    tools = httpx2.get(f"{url}/agent/tools", headers={"authorization": f"Bearer {mine}"}).json()["tools"]
    assert [t["function"]["name"] for t in tools] == ["add"]


def test_a_host_header_does_not_say_where_the_agent_asks(url: str, script: Script) -> None:
    script.says("ok")
    events = turn(url, [{"role": "user", "content": "x"}], host="evil.example:80")
    assert events[-1]["type"] == "done"


def test_the_page_runs_its_own_script_and_nothing_else(url: str) -> None:
    for path in ("/", "/chat"):
        response = httpx2.get(f"{url}{path}")
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        for tag in ("script", "style"):
            (block,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
            assert f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" in policy
        assert not re.search(r"""(src|href)=["'](?!data:)""", response.text)
        assert "innerHTML" not in response.text
        assert set(re.findall(r"https?://[^\"']+", response.text)) == {
            "http://www.w3.org/2000/svg"
        }  # a name, not a place


def test_tools_that_cannot_be_loaded_stop_the_start_and_servers_that_cannot_be_used_the_turn(
    world: World, script: Script, tmp_path: Path
) -> None:
    config = world.setups[1].config
    with pytest.raises(ConfigError, match="cannot be imported"):
        EdgeNode(with_agent(config, script, tools=("nothing:here",)), clock=world.clock)
    key = tmp_path / "key"
    write_private(key, b"k")
    broken = McpSettings(url="http://127.0.0.1:9/mcp", key_file=key)
    node = EdgeNode(with_agent(config, script, mcp={"gone": broken}), clock=world.clock)
    with serving(node.app) as url:
        for _ in range(2):  # and it is tried again
            response = httpx2.post(f"{url}/agent/chat", json={"messages": [{"role": "user", "content": "x"}]})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "tools_unavailable"
    node.close()


def test_settings_refuse_a_line_for_a_shell() -> None:
    with pytest.raises(ValueError, match="there is no shell"):
        McpSettings(command="rm -rf x")  # type: ignore[arg-type]
