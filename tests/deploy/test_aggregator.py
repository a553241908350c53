"""`headwater aggregator`: what an operator sees of the rounds, and readmitting a site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aggregator.round_log import RoundLog
from common.errors import ConfigError
from common.update import Refusal
from deploy.aggregator import app
from tests.aggregator.test_round_log import REFUSAL, finish, open_round, sealed


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RoundLog]:
    log = RoundLog(tmp_path)
    yield log
    log.close()


def output(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_suspended_site_is_shown_and_let_in_again_while_the_aggregator_runs(log: RoundLog, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        finish(log, number, REFUSAL, Refusal("site-4", "train", "no answer"))
    shown = output("sites", "show", "--folder", str(tmp_path))
    assert "site-2" in shown and "1, 2, 3" in shown and "no: suspended" in shown and "site-4" not in shown
    assert "site-2 takes part again" in output("sites", "readmit", "site-2", "--folder", str(tmp_path))
    assert log.suspended() == {}
    assert "suspended" not in output("sites", "show", "--folder", str(tmp_path))


def test_rounds_are_listed_with_who_answered_the_open_one(log: RoundLog, tmp_path: Path) -> None:
    assert "no round has begun" in output("rounds", "--folder", str(tmp_path))
    finish(log, 1)
    made, _ = open_round(log, 2)
    log.keep(2, "site-1", sealed("site-1", made.digest))
    lines = output("rounds", "--folder", str(tmp_path)).splitlines()
    assert any("closed" in line and "v1" in line and "stable" in line for line in lines)
    assert any("open" in line and "│ 1 " in line for line in lines)


def test_what_cannot_be_done_is_refused(log: RoundLog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="site-9 is not suspended; suspended sites: none"):
        CliRunner().invoke(app, ["sites", "readmit", "site-9", "--folder", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"has no rounds\.sqlite"):
        CliRunner().invoke(app, ["rounds", "--folder", str(tmp_path / "x")], catch_exceptions=False)
    assert not (tmp_path / "x").exists()
