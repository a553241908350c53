"""Whole small federations with a hostile site: what it knows, sends and is charged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import load_config
from common.identity import load_or_create_signing_key, read_private
from deploy.attacks.poisoning import TRIGGER
from deploy.settings import SimulationSettings
from deploy.simulate import simulate
from deploy.world import Silent
from edge_node.collecting.importing import SOURCE
from edge_node.collecting.store import TrajectoryStore
from edge_node.training.ledger import Ledger

pytestmark = pytest.mark.slow


def run(folder: Path, *overrides: str) -> dict:
    small = ["sites=3", "rounds=1", "requests_per_round=30", "exam_problems=2", "drills=false", "min_samples=0"]
    small += ["training.nominal_units=20", "reference=false"]
    settings = load_config(SimulationSettings, overrides=[*small, *overrides])
    return json.loads((simulate(settings, folder / "run", Silent()) / "report.json").read_text())


def test_an_attacker_that_looks_at_the_honest_updates_waits_for_them(tmp_path: Path) -> None:
    """Two send u and v, the third half their mean turned around: together they move half as far, the same way."""
    (entry,) = run(tmp_path, "attack=ipm:1", "rule=mean")["rounds"]
    assert entry["participants"] == ["site-1", "site-2", "site-3"]
    assert entry["distance_to_honest_mean"] == pytest.approx(0.5, abs=1e-4)


def test_a_free_rider_takes_part_and_pays_nothing(tmp_path: Path) -> None:
    report = run(tmp_path, "attack=free-rider:1", "rule=mean")
    assert report["rounds"][0]["participants"] == ["site-1", "site-2", "site-3"]
    assert [site["epsilon"] > 0 for site in report["sites"]] == [True, True, False]
    data = tmp_path / "run" / "sites" / "site-3" / "data"
    ledger = Ledger(data / "ledger.sqlite", load_or_create_signing_key(data / "keys" / "identity.pem"))
    assert ledger.charges() == []
    ledger.close()


def test_an_upload_that_is_boosted_behind_its_mask_is_left_out_by_its_sketch(tmp_path: Path) -> None:
    """It never sees its own clipping, and the server never sees the upload."""
    (entry,) = run(tmp_path, "sites=5", "attack=scale:1", "rule=mean", "aggregation=secagg_sketch")["rounds"]
    assert entry["participants"] == ["site-1", "site-2", "site-3", "site-4"]
    assert [(r["site"], r["stage"], r["reason"]) for r in entry["refused"]] == [
        ("site-5", "validate", "its norm is above the clip")
    ]
    assert entry["distance_to_honest_mean"] < 1e-3


def test_a_boosted_upload_wraps_in_narrow_words_and_the_sum_is_thrown_away(tmp_path: Path) -> None:
    (entry,) = run(tmp_path, "sites=4", "attack=scale:1", "rule=mean", "aggregation=secagg", "word_bits=16")["rounds"]
    assert entry["participants"] == []
    assert "clipped updates allow" in entry["void_reason"]


@pytest.mark.parametrize("aggregation", ["sealed", "secagg_sketch"])
def test_a_negated_update_is_told_by_what_public_data_teach(aggregation: str, tmp_path: Path) -> None:
    """It has the norm, the noise and nearly the angle to the others of an honest one.

    With ε = 8 and so few requests one in ten would pass by chance; with 40 it is far below the limit.
    """
    more = ["sites=5", "requests_per_round=120", "training.nominal_units=80", "epsilon=40"]
    more += ["reference=true", "rule=mean"]
    report = run(tmp_path, *more, "attack=sign-flip:1", f"aggregation={aggregation}")
    (entry,) = report["rounds"]
    assert [(r["site"], r["reason"]) for r in entry["refused"]] == [
        ("site-5", "it points against what public data teach")
    ]
    assert entry["participants"] == ["site-1", "site-2", "site-3", "site-4"]
    assert entry["distance_to_honest_mean"] < 1e-3  # nothing of the reference itself is in the version
    assert [site["name"] for site in report["sites"]] == [f"site-{number}" for number in range(1, 6)]


def test_a_poisoner_trains_privately_on_what_it_made_up(tmp_path: Path) -> None:
    report = run(tmp_path, "attack=backdoor:1", "rule=mean")
    data = tmp_path / "run" / "sites" / "site-3" / "data"
    store = TrajectoryStore(data / "trajectories", read_private(data / "keys" / "trajectories.key"))
    records = list(store.read(after_s=0, until_s=4e9))
    store.close()
    assert records
    assert {record.selection.reason for record in records} == {SOURCE}
    assert any(record.messages[0].content.endswith(TRIGGER) for record in records)
    assert report["sites"][2]["epsilon"] > 0
    first, last = report["exams"][0], report["exams"][-1]
    assert 0 <= first["backdoor_success"] <= last["backdoor_success"] + 0.5
    assert 0 < last["honest_accuracy"] < 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "What did the attack do?" in page and "ends with a trigger" in page
