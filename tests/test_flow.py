"""The whole loop on three sites: from a user's request to a served version, in under a minute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.adapter import initial_adapter
from common.config import load_config
from common.identity import load_or_create_signing_key, read_private
from common.inference.model_folder import ModelFolder
from common.tasks import math as task
from deploy.settings import SimulationSettings
from deploy.simulate import simulate
from deploy.world import Silent
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.training.ledger import Ledger
from model_hub.repository import RepositoryReader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = load_config(
        SimulationSettings,
        overrides=[
            "sites=3",
            "rounds=2",
            "attack=scale:1",
            "epsilon=4",
            "requests_per_round=60",
            "exam_problems=20",
            "training.nominal_units=40",
            "min_samples=0",
            "seed=7",
        ],
    )
    return simulate(settings, tmp_path_factory.mktemp("flow") / "run", Silent())


def trajectories(run: Path, site: str) -> list[Trajectory]:
    data = run / "sites" / site / "data"
    store = TrajectoryStore(data / "trajectories", read_private(data / "keys" / "trajectories.key"))
    return list(store.read(after_s=0, until_s=4e9))


def report(run: Path) -> dict:
    return json.loads((run / "report.json").read_text())


def test_users_were_served_and_recorded_encrypted(run: Path) -> None:
    for site in ("site-1", "site-2", "site-3"):
        records = trajectories(run, site)
        assert len(records) >= 2 * 60 * 2
        assert all(r.completion_token_ids and r.logprobs and r.rewards for r in records)
        served = {r.model_version for r in records}
        assert {"v0", "v1"} <= served
        files = list((run / "sites" / site / "data" / "trajectories").glob("*.sqlite"))
        assert len(files) >= 2
        assert all(b"What is" not in f.read_bytes() and b"Compute" not in f.read_bytes() for f in files)


def test_held_out_and_golden_problems_never_became_training_data(run: Path) -> None:
    for site in ("site-1", "site-2", "site-3"):
        for record in trajectories(run, site):
            problem = task.parse(record.messages[0].content)
            assert problem is not None
            assert task.split_of(problem) is task.Split.TRAIN


def test_some_users_were_served_by_the_canary(run: Path) -> None:
    arms = [r.arm for site in ("site-1", "site-2", "site-3") for r in trajectories(run, site)]
    assert 0 < arms.count("canary") < 0.2 * len(arms)


def test_every_round_was_charged_to_every_ledger(run: Path) -> None:
    for row in report(run)["sites"]:
        data = run / "sites" / row["name"] / "data"
        ledger = Ledger(data / "ledger.sqlite", load_or_create_signing_key(data / "keys" / "identity.pem"))
        assert len(ledger.charges()) == 2
        assert row["epsilon"] == ledger.epsilon_spent(row["delta"])
        assert 3.5 < row["epsilon"] <= 4.0
        ledger.close()


def test_the_boosted_site_was_refused_in_every_round_and_the_rest_combined(run: Path) -> None:
    rounds = report(run)["rounds"]
    assert [r["number"] for r in rounds] == [1, 2]
    for entry in rounds:
        assert entry["participants"] == ["site-1", "site-2"]
        assert [(r["site"], r["stage"]) for r in entry["refused"]] == [("site-3", "validate")]
        assert "norm" in entry["refused"][0]["reason"]
        assert entry["distance_to_honest_mean"] < 1e-5  # the mean of the honest, in float32


def test_versions_went_through_the_canary_and_the_bad_ones_were_rolled_back(run: Path) -> None:
    versions = {v["id"]: v for v in report(run)["versions"]}
    assert [s["state"] for s in versions["v1"]["history"]][:3] == ["candidate", "gated", "canary"]
    crash = next(v for v in versions.values() if v["drill"] == "crash")
    worse = next(v for v in versions.values() if v["drill"] == "worse")
    assert crash["state"] == worse["state"] == "rolled_back"
    assert crash["reason"].startswith("errors")
    assert worse["reason"].startswith("reward")
    assert worse["evidence"][-1]["canary_errors"] <= 1


def test_what_is_published_verifies_and_is_the_recorded_digest(run: Path, model: ModelFolder) -> None:
    hub_key = load_or_create_signing_key(run / "hub" / "hub.pem")
    reader = RepositoryReader(run / "hub" / "repository", hub_public=hub_key.public)
    settings = SimulationSettings()
    like = initial_adapter(model.module_shapes(), settings.lora.shape, seed=7)
    for version in report(run)["versions"]:
        adapter = reader.adapter(version["id"], like=like, base_digest=model.digest)
        assert adapter.digest == version["digest"]


def test_the_report_has_its_documented_keys(run: Path) -> None:
    data = report(run)
    assert data["schema_version"] == 1
    assert data["seconds"] > 0
    assert data["settings"]["sites"] == 3
    assert set(data["sites"][0]) >= {
        "name",
        "attack",
        "epsilon",
        "delta",
        "reward_before",
        "reward_after",
        "reward_gain_low95",
    }
    assert [s["attack"] for s in data["sites"]] == [None, None, "scale"]
    assert set(data["rounds"][0]) >= {"number", "participants", "refused", "version"}
    assert set(data["versions"][0]) >= {"id", "digest", "state", "reason"}
    for site in data["sites"]:
        assert 0 <= site["reward_before"] <= 1
        assert site["reward_gain_low95"] <= site["reward_after"] - site["reward_before"]


def test_the_page_is_one_file_without_outside_references(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "What did the attack do?" in page and "ends with a trigger" not in page  # there is no backdoor
    assert "<script" not in page
    assert "src=" not in page
    for site in ("site-1", "site-2", "site-3"):
        assert site in page
    assert not list(run.parent.glob(".*partial*"))
