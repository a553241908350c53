"""The chat page in a real browser, on real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.inference.model_folder import ModelFolder
from deploy.founding import build_world
from deploy.settings import SimulationSettings
from deploy.world import Silent, World
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.node import EdgeNode
from tests.edge_node.agent.scripted import Refuses, Says, Script, scripted, serving
from tests.edge_node.agent.test_http_api import with_agent

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: ModelFolder) -> Iterator[World]:
    settings = SimulationSettings(sites=3, rounds=2, attack="none", min_samples=0)
    world = build_world(settings, model, tmp_path_factory.mktemp("chat"), Silent())
    yield world
    world.hub.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


class Page:
    """The page, and everything it complained about or asked of others."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.problems: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda r: self.problems.append(r.url) if not r.url.startswith((url, "data:")) else None)
        self.page.goto(url)

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.keyboard.press("Enter")

    def done(self) -> None:
        self.page.locator("#log[aria-busy=false] .under").last.wait_for()

    @property
    def turns(self) -> list[str]:
        return self.page.locator(".turn").all_inner_texts()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_a_conversation_with_the_embedded_model(browser: Any, world: World, width: int, scheme: str) -> None:
    node = EdgeNode(world.setups[0].config, clock=world.clock)
    node.look_again()
    with serving(node.app) as url:
        made = Page(browser, url, viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = made.page
        assert page.title() == "Headwater chat"
        page.get_by_text("version v0").wait_for()
        made.ask("What is 23+45?")
        made.done()
        assert made.turns[0] == "What is 23+45?"
        assert made.turns[1].strip()
        assert "v0 · stable" in page.locator(".under").inner_text()
        recorded = [r.messages[-1].content.strip() for r in node.store.read(after_s=0, until_s=4e9)]
        assert made.turns[1].strip() in recorded

        def latest() -> Trajectory:
            return list(node.store.read(after_s=0, until_s=4e9))[-1]

        def ratings() -> list[float]:
            return [event.rating for event in latest().feedback]

        good, bad = (page.get_by_role("button", name=name) for name in ("Good answer", "Bad answer"))
        good.click()
        page.locator(".thumb.up[aria-pressed=true]").wait_for()
        assert ratings() == [1.0]
        good.click()  # again: nothing to say
        bad.click()
        page.locator(".thumb.down[aria-pressed=true]").wait_for()
        assert good.get_attribute("aria-pressed") == "false"
        assert ratings() == [-1.0]
        assert len(latest().user_pseudonym) == 32

        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
        assert dark is (scheme == "dark")
        page.get_by_role("button", name="New chat").click()
        assert made.turns == []
        assert page.evaluate("document.activeElement.id") == "text"
        assert made.problems == []
        made.context.close()
    node.close()


def test_who_asks_is_one_user_for_one_browser_and_another_for_another(browser: Any, world: World) -> None:
    with scripted() as script:
        node = EdgeNode(with_agent(world.setups[0].config, script), clock=world.clock)
        with serving(node.app) as url:
            for name in ("ann", "bob"):
                made = Page(browser, url)
                script.says(f"{name} 1.")
                made.ask(f"{name} 1")
                made.done()
                made.page.reload()
                script.says(f"{name} 2.")
                made.ask(f"{name} 2")
                made.done()
                assert made.problems == []
                made.context.close()
        said = {r.messages[-1].content: r.user_pseudonym for r in node.store.read(after_s=0, until_s=4e9)}
        node.close()
    assert said["ann 1."] == said["ann 2."]
    assert said["bob 1."] == said["bob 2."]
    assert said["ann 1."] != said["bob 1."]


@pytest.fixture
def scripted_node(world: World, request: pytest.FixtureRequest) -> Iterator[tuple[EdgeNode, str, Script]]:
    with scripted() as script:
        tools = ("tests.edge_node.agent.test_http_api:add",)
        site = getattr(request, "param", 1)
        node = EdgeNode(with_agent(world.setups[site].config, script, tools=tools), clock=world.clock)
        with serving(node.app) as url:
            yield node, url, script
        node.close()


def test_tools_failures_and_hostile_texts(browser: Any, scripted_node: tuple[EdgeNode, str, Script]) -> None:
    _, url, script = scripted_node
    made = Page(browser, url)
    page = made.page

    script.then(Says("Let me add.", calls=(("c1", "add", '{"x": 2, "y": 3}'), ("c2", "add", '{"x": "z"}'))))
    script.says("It is <b>5</b>. <img src=x onerror=alert(1)><script>alert(2)</script>")
    made.ask("What is 2+3?")
    made.done()
    assert made.turns[1:] == ["Let me add.", "It is <b>5</b>. <img src=x onerror=alert(1)><script>alert(2)</script>"]
    assert page.locator(".turn b, .turn img, .turn script").count() == 0
    summaries = page.locator("summary").all_inner_texts()
    assert summaries[0].startswith("add ran in ")
    assert summaries[1].startswith("add failed in ")
    page.locator("summary").first.click()
    assert page.locator("pre.result").first.inner_text() == "5"

    script.then(*[Refuses(500)] * 2)
    made.ask("And now?")
    page.get_by_role("alert").wait_for()
    assert "500" in page.get_by_role("alert").inner_text()
    assert page.get_by_label("Message").input_value() == "And now?"  # nothing typed is lost

    page.get_by_role("button", name="New chat").click()
    script.then(Says("slow " * 40, pause_s=0.2))
    made.ask("Tell me a story.")
    page.locator(".turn.answer", has_text="slow").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("alert").wait_for()
    assert "Stopped" in page.get_by_role("alert").inner_text()
    script.says("Yes.")
    made.ask("Are you there?")
    made.done()
    assert [m["content"] for m in script.requests[-1]["messages"]] == ["Are you there?"]  # without what was stopped
    assert made.problems == []
    made.context.close()


@pytest.mark.parametrize("scripted_node", [2], indirect=True)
def test_a_key_is_asked_for_where_one_is_needed(browser: Any, scripted_node: tuple[EdgeNode, str, Script]) -> None:
    node, url, script = scripted_node
    key = node.keys.add("me", ["chat", "feedback"], now_s=1)
    made = Page(browser, url)
    page = made.page
    made.ask("Hello?")
    page.get_by_role("dialog").wait_for()
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="hidden")
    script.says("Hello.")
    assert page.get_by_label("Message").input_value() == "Hello?"
    page.get_by_role("button", name="Send").click()
    made.done()
    assert made.turns[-1] == "Hello."
    page.get_by_role("button", name="Bad answer").click()
    page.locator("button[aria-pressed=true]").wait_for()
    assert {r.key_id for r in node.store.read(after_s=0, until_s=4e9) if r.messages[-1].content == "Hello."} == {"me"}
    page.reload()
    script.says("Again.")
    made.ask("Still me?")
    made.done()
    assert [p for p in made.problems if "401" not in p] == []
    made.context.close()
