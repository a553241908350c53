"""`headwater audit`: files, exit codes, and pages a person can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from common.accounting import PrivateSteps, epsilon
from common.errors import ConfigError, TrustError
from common.identity import load_or_create_signing_key
from common.inference.model_folder import ModelFolder
from deploy import audit
from deploy.audit import Sizes, audit_privacy, mechanism_of_node, write_statement
from deploy.founding import build_world
from deploy.settings import SimulationSettings
from deploy.world import Silent, World
from edge_node.auditing.inversion import audit_inversion
from edge_node.auditing.mechanism import AuditedMechanism
from edge_node.auditing.statement import Check, Figure, Statement
from edge_node.config import EdgeConfig
from edge_node.training.ledger import Ledger
from edge_node.training.noise import SecureRandom
from tests.conftest import SHAPE
from tests.deploy.conftest import Headwater

CHROMIUM = Path("/usr/bin/chromium")
SMALL = Sizes(noise_values=5_000, gradient_values=100, sampled_units=200, sampled_steps=50, canaries=300)
MECHANISM = AuditedMechanism(PrivateSteps(1.2, 0.5, 10), clip_norm=0.1, delta=1e-5)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small samples, a known σ and no second process: those have tests of their own."""
    monkeypatch.setattr(audit, "QUICK", SMALL)
    monkeypatch.setattr(audit, "mechanism_of_simulation", lambda: (MECHANISM, "the default settings"))
    monkeypatch.setattr("edge_node.auditing.mechanism.repeated_in_another_process", lambda: 0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(audit.app, list(arguments))


def test_a_pass_writes_json_and_page(tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = run("privacy", "--quick", "--output", str(target))
    assert result.exit_code == 0, result.output
    data = json.loads((target / "audit.json").read_text())
    assert data["schema_version"] == 1
    assert data["passed"] is True
    assert [check["code"] for check in data["checks"]] == ["A1", "A2", "A3", "A4"]
    assert data["subject"]["noise_multiplier"] == 1.2
    assert data["subject"]["epsilon"] == epsilon([MECHANISM.event], delta=1e-5)
    page = (target / "audit.html").read_text()
    assert "4 of 4" in page
    assert "It does not prove" in page
    assert "FAIL" not in page


def test_a_failure_is_exit_code_1_and_names_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SecureRandom.normal
    monkeypatch.setattr(SecureRandom, "normal", lambda self, count: right(self, count) / 2)
    result = run("privacy", "--quick", "--output", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "FAIL  A1" in result.output
    assert "standard deviation of an empty batch" in result.output
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "Do not train with this installation" in page
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["passed"] is False


def test_settings_that_cannot_work_are_exit_code_2_and_leave_nothing(headwater: Headwater, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for arguments, text in (
        (("privacy", "--config", str(tmp_path / "absent.toml")), "absent.toml"),
        (("privacy", "--output", str(tmp_path / "taken")), "exists"),
        (("inversion", "--model", str(tmp_path / "no-model")), "no-model"),
    ):
        result = headwater("audit", *arguments)
        assert result.returncode == 2
        assert text in result.stderr
        assert result.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.fixture
def world(tmp_path: Path, model: ModelFolder) -> Iterator[World]:
    world = build_world(SimulationSettings(sites=3, attack="none"), model, tmp_path, Silent())
    yield world
    world.hub.close()


@pytest.fixture
def config(world: World, tmp_path: Path) -> Path:
    site = world.setups[0].config
    fields = ("federation", "name", "data_dir", "policy", "hub", "hub_key", "aggregator_key")
    file = tmp_path / "edge.toml"
    file.write_text("".join(f'{field} = "{getattr(site, field)}"\n' for field in fields))
    return file


def test_a_nodes_ledger_says_what_is_audited(world: World, config: Path) -> None:
    """Training alone: what readiness charges beside it goes another way than clipped gradients."""
    data = world.setups[0].config.data_dir
    ledger = Ledger(data / "ledger.sqlite", load_or_create_signing_key(data / "keys" / "identity.pem"))
    ledger.open_budget(
        {"training": PrivateSteps(2.5, 0.25, 3), "readiness": PrivateSteps(10.0, 1.0, 1)}, now_s=1.0, unit="trajectory"
    )
    for number in range(4):
        for purpose in ("readiness", "training"):
            ledger.reserve(
                purpose, f"simulation/{number}", f"{number:064x}", epsilon_total=8.0, delta=1e-5, now_s=2.0 + number
            )
    ledger.close()
    mechanism, source = mechanism_of_node(config, [])
    assert mechanism.event == PrivateSteps(2.5, 0.25, 12)
    assert mechanism.delta == world.settings.delta
    assert "the ledger of site-1, 4 rounds" in source


def test_a_node_that_charged_nothing_is_audited_at_its_policys_strength(world: World, config: Path) -> None:
    """Its real ledger is opened; the noise is the one that the policy's ε allows."""
    mechanism, source = mechanism_of_node(config, [])
    assert "nothing was charged yet" in source
    assert 0.97 * world.settings.epsilon < epsilon([mechanism.event], delta=mechanism.delta) <= world.settings.epsilon
    site: EdgeConfig = world.setups[0].config
    (site.data_dir / "ledger.sqlite").write_bytes(b"edited")
    with pytest.raises(TrustError):
        mechanism_of_node(config, [])
    with pytest.raises(ConfigError, match="holds no node"):
        mechanism_of_node(config, [f"data_dir={site.data_dir / 'nowhere'}"])


def test_texts_of_a_model_are_escaped(tmp_path: Path) -> None:
    check = Check("A9", "<script>alert(1)</script>", "t", "m", "n", (Figure("<b>", 1.0, 0.0, 2.0),))
    subject = {**audit_privacy(MECHANISM, SMALL, source="<i>s</i>").subject}
    write_statement(Statement("privacy", subject, (check,)), tmp_path, made_at=NOW, seconds=1.0)
    page = (tmp_path / "audit.html").read_text()
    assert "<script" not in page
    assert "<i>s</i>" not in page


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_pages_are_readable(tmp_path: Path, model: ModelFolder, width: int, scheme: str) -> None:
    from playwright.sync_api import sync_playwright

    inversion = audit_inversion(model, SHAPE, MECHANISM, draws=2, texts=["What is 47+85?"], noises=(0.0,))
    statements = {"privacy": audit_privacy(MECHANISM, SMALL, source="a test"), "inversion": inversion}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if "audit.html" not in request.url else None)
        for kind, statement in statements.items():
            (tmp_path / kind).mkdir()
            write_statement(statement, tmp_path / kind, made_at=NOW, seconds=1.0)
            page.goto((tmp_path / kind / "audit.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            ink, paper = page.evaluate(
                "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
                ".map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))"
            )
            assert (ink > paper) == (scheme == "dark")
            assert abs(ink - paper) > 500
        assert page.locator("mark").count() > 0
        browser.close()
    assert problems == []
