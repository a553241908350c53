"""`headwater edge chat` against a real node, whose model follows a script."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.identity import write_private
from common.inference.model_folder import ModelFolder
from deploy.edge_chat import printable
from deploy.founding import build_world
from deploy.settings import SimulationSettings
from deploy.world import Silent, World
from edge_node.node import EdgeNode
from tests.deploy.conftest import Headwater, Run
from tests.edge_node.agent.scripted import Refuses, Says, Script, scripted, serving
from tests.edge_node.agent.test_http_api import with_agent


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: ModelFolder) -> Iterator[World]:
    settings = SimulationSettings(sites=3, rounds=2, attack="none", min_samples=0)
    world = build_world(settings, model, tmp_path_factory.mktemp("edge-chat"), Silent())
    yield world
    world.hub.close()


@pytest.fixture(scope="module")
def running(world: World) -> Iterator[tuple[EdgeNode, str, Script]]:
    with scripted() as script:
        node = EdgeNode(with_agent(world.setups[0].config, script), clock=world.clock)
        with serving(node.app) as url:
            yield node, url, script
        node.close()


Chat = Callable[..., Run]


@pytest.fixture
def chat(
    running: tuple[EdgeNode, str, Script], headwater: Headwater, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Chat:
    """Type lines; the node's requests of before are forgotten."""
    config = tmp_path / "edge.toml"
    config.write_text('[agent]\ntools = ["tests.edge_node.agent.test_http_api:add"]\nsystem = "Be brief."\n')
    running[2].requests.clear()
    running[2].answers.clear()

    def run(*lines: str, url: str = running[1], key: Path | None = None) -> Run:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = ["--key-file", str(key)] if key is not None else []
        return headwater("edge", "chat", "--config", str(config), "--url", url, "--user", "jane", *options)

    return run


def test_a_conversation_shows_tools_and_versions_and_goes_on(chat: Chat, running: tuple[EdgeNode, str, Script]) -> None:
    node, _, script = running
    script.then(Says("Adding.", calls=(("c1", "add", '{"x": 2, "y": 3}'),)), Says("It is 5."), Says("Yes."))
    ran = chat("What is 2+3?", "", "Sure?", "/quit", "never asked")
    assert ran.returncode == 0
    shown = ran.stdout.splitlines()
    assert "tools: add" in shown[0]
    assert [line for line in shown if line][1:] == [
        "Adding.", '→ add {"x": 2, "y": 3}', f"← add: 5 ({_seconds(shown)} s)", "It is 5.", "[base stable]", "Yes.",
        "[base stable]",
    ]  # fmt: skip
    roles = [m["role"] for m in script.requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    records = [r for r in node.store.read(after_s=0, until_s=4e9) if r.messages[-1].content == "Yes."]
    assert len(records[-1].user_pseudonym) == 32


def _seconds(shown: list[str]) -> str:
    (line,) = (line for line in shown if line.startswith("← add: 5 ("))
    return line.removeprefix("← add: 5 (").removesuffix(" s)")


def test_the_last_thumb_counts_for_the_whole_turn(chat: Chat, running: tuple[EdgeNode, str, Script]) -> None:
    node, _, script = running
    script.then(Says(calls=(("c1", "add", '{"x": 2, "y": 3}'),)), Says("Rate me."))
    ran = chat("/up", "What is 2+3?", "/down", "/up")
    said = [line for line in ran.stdout.splitlines() if line]
    assert said[1] == "there is no answer to rate yet"
    assert said[-2:] == ["rated", "rated"]
    turn = [r for r in node.store.read(after_s=0, until_s=4e9) if r.feedback]
    assert [([f.rating for f in r.feedback], len(r.messages)) for r in turn] == [([1.0], 3), ([1.0], 5)]


def test_a_new_conversation_forgets_the_old_one(chat: Chat, running: tuple[EdgeNode, str, Script]) -> None:
    script = running[2]
    script.then(Says("one"), Says("two"))
    ran = chat("first", "/new", "second", "/help")
    assert [m["content"] for m in script.requests[1]["messages"]] == ["Be brief.", "second"]
    assert "/quit ends" in ran.stdout.splitlines()[-1]


def test_what_fails_is_told_and_the_conversation_goes_on(chat: Chat, running: tuple[EdgeNode, str, Script]) -> None:
    script = running[2]
    script.then(Refuses(400, message="not like that"), Says("fine"))
    ran = chat("first", "second")
    assert "not like that" in ran.stdout
    assert "fine" in ran.stdout
    assert [m["content"] for m in script.requests[1]["messages"]] == ["Be brief.", "second"]
    assert "no node answers at http://127.0.0.1:9" in chat("x", url="http://127.0.0.1:9").stdout


def test_what_a_model_writes_cannot_steer_the_terminal(chat: Chat, running: tuple[EdgeNode, str, Script]) -> None:
    running[2].then(Says("\x1b]0;owned\x07[bold]plain[/bold]\x9b2J\r\nnext"))
    shown = chat("x").stdout
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown)
    assert "[bold]plain[/bold]" in shown
    assert printable("ä\t\u202e\x00\x7f") == "ä\t"


def test_a_key_is_used_and_its_file_must_be_private(
    chat: Chat, running: tuple[EdgeNode, str, Script], tmp_path: Path
) -> None:
    node, _, script = running
    secret = node.keys.add("jane", ["chat", "feedback"], now_s=1)
    assert "a valid API key is needed" in chat("x").stdout
    write_private(tmp_path / "key", secret.encode())
    script.says("Hello.")
    assert "Hello." in chat("x", key=tmp_path / "key").stdout
    (tmp_path / "key").chmod(0o644)
    refused = chat("x", key=tmp_path / "key")
    assert refused.returncode == 2
    assert "chmod 600" in refused.stderr
    assert chat("x", key=tmp_path / "none").returncode == 2
