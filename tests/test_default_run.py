"""What the default simulation promises, measured on a whole run; and the same on Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def simulate(output: Path, *arguments: str) -> dict:
    command = [sys.executable, "-m", "deploy.cli", "simulate", "--output", str(output), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
    for line in (str(output / "report.html"), str(output / "report.json"), "gain at least"):
        assert line in run.stdout
    return json.loads((output / "report.json").read_text())


@pytest.mark.slow
def test_agents_get_better_privately_and_the_hostile_site_is_refused(tmp_path: Path) -> None:
    report = simulate(tmp_path / "run")
    assert report["pooled"]["reward_gain_low95"] > 0
    honest = [site for site in report["sites"] if site["attack"] is None]
    assert len(honest) == 5
    assert all(site["reward_gain_high95"] > 0 for site in honest)  # none significantly worse
    assert all(0 < site["epsilon"] <= 8 and site["delta"] == 1e-5 for site in report["sites"])
    assert len(report["rounds"]) == 5
    assert report["settings"]["aggregation"] == "secagg_sketch"
    for entry in report["rounds"]:
        assert [refusal["site"] for refusal in entry["refused"]] == ["site-6"]
    reasons = [entry["refused"][0]["reason"] for entry in report["rounds"]]
    assert "norm" in reasons[0]
    assert all("left out of an earlier sum" in reason for reason in reasons[1:])
    assert {v["rule"] for v in report["versions"] if v["rule"]} == {"secagg_sketch+reference"}
    drills = {version["drill"]: version for version in report["versions"] if version["drill"]}
    assert {name: v["state"] for name, v in drills.items()} == {"crash": "rolled_back", "worse": "rolled_back"}
    assert all(version["caught"] for version in drills.values())


@pytest.mark.slow
def test_the_same_run_works_on_ray(tmp_path: Path) -> None:
    short = [
        "--set", "requests_per_round=40", "--set", "exam_problems=10", "--set", "training.nominal_units=27",
        "--set", "drills=false", "--set", "min_samples=0",
    ]  # fmt: skip
    report = simulate(tmp_path / "run", "--grid", "ray", "--sites", "3", "--rounds", "1", *short)
    assert report["rounds"][0]["participants"] == ["site-1", "site-2"]
    assert [r["site"] for r in report["rounds"][0]["refused"]] == ["site-3"]


@pytest.mark.slow
def test_without_privacy_the_run_says_so(tmp_path: Path) -> None:
    short = ["--set", "requests_per_round=40", "--set", "exam_problems=10", "--set", "drills=false"]
    report = simulate(tmp_path / "run", "--unsafe-no-dp", "--sites", "3", "--rounds", "1", *short)
    assert report["privacy"]["private"] is False
    assert [site["epsilon"] for site in report["sites"]] == [None, None, None]
