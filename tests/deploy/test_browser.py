"""The report as a person sees it, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.inference.model_folder import ModelFolder
from deploy.settings import SimulationSettings, TrainingSettings
from deploy.simulate import simulate
from deploy.world import Silent

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, model: ModelFolder) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("browser")
    common = {"sites": 3, "rounds": 1, "requests_per_round": 30, "exam_problems": 10, "drills": False}
    training = TrainingSettings(nominal_units=20.0)
    made = {}
    for name, unsafe in (("private", False), ("unsafe", True)):
        settings = SimulationSettings(**common, unsafe_no_dp=unsafe, training=training)  # type: ignore[arg-type]
        made[name] = simulate(settings, folder / name, Silent()) / "report.html"
    return made


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
@pytest.mark.parametrize("width", [1200, 420])
def test_the_page_shows_what_the_run_found(reports: dict[str, Path], width: int) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if "report.html" not in request.url else None)

        page.goto(reports["private"].as_uri())
        assert page.title() == "Headwater simulation report"
        assert page.locator("svg").count() == 5
        assert page.locator("h2").count() == 5
        assert page.locator(".alarm").count() == 0
        rows = page.locator("table").first.locator("tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows[1:]] == ["site-1", "site-2", "site-3"]
        assert "hostile: scale" in rows[3]
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.locator("summary").click()
        assert '"sites": 3' in page.locator("pre").inner_text()

        page.goto(reports["unsafe"].as_uri())
        alarm = page.locator(".alarm")
        assert "WITHOUT differential privacy" in alarm.inner_text()
        assert alarm.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(220, 38, 38)"
        assert "no privacy" in page.locator("table").first.inner_text()
        browser.close()
    assert problems == []
