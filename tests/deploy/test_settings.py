"""Settings of a simulation: profiles, objectives and modes, as a person would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import load_config
from common.errors import ConfigError
from common.inference.model_folder import ModelFolder
from deploy.founding import with_room_for_sketches
from deploy.settings import PROFILES, QUICK, SimulationSettings
from edge_node.training.objectives import OBJECTIVES, objective_of
from tests.deploy.conftest import Headwater


def load(*overrides: str, profile: str = "dp", **flags: Any) -> SimulationSettings:
    return load_config(SimulationSettings, defaults=PROFILES[profile], flags=flags, overrides=overrides)


def test_the_dp_profile_is_the_default() -> None:
    assert load() == SimulationSettings()
    settings = SimulationSettings()
    assert (settings.algorithm, settings.lora_mode, settings.balance, settings.patience) == (
        "dpo",
        "alternate",
        False,
        0,
    )
    plan = settings.training.plan("dpo")
    assert (plan.optimizer, plan.lora_dropout, plan.hyperparameters) == ("sgd", 0.0, {"beta": 0.1})
    assert plan.expected_batch == plan.sampling_rate * settings.training.nominal_units


def test_the_source_profile_keeps_the_numbers_of_the_original_design() -> None:
    settings = load(profile="source")
    assert (settings.lora.rank, settings.lora.alpha) == (8, 32.0)
    assert settings.min_samples == settings.edge_training.min_samples == 100
    assert settings.physical_batch == settings.edge_training.physical_batch == 16
    plan = settings.training.plan(settings.algorithm)
    assert (plan.optimizer, plan.learning_rate, plan.lora_dropout) == ("adam", 1e-5, 0.1)
    assert plan.expected_batch == pytest.approx(16 * 4)  # a batch of 16, accumulated 4 times


def test_what_is_given_wins_over_the_profile() -> None:
    settings = load("training.steps=9", "lora.alpha=8", profile="source")
    assert (settings.training.steps, settings.training.optimizer) == (9, "adam")
    assert (settings.lora.rank, settings.lora.alpha) == (8, 8.0)


def test_a_profile_is_not_changed_by_what_is_laid_over_it() -> None:
    load("training.steps=9", profile="source")
    assert load(profile="source").training.steps == 4


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_profile_loads_with_every_objective(profile: str, quick: bool) -> None:
    defaults = {**(QUICK if quick else {}), **PROFILES[profile]}
    for name in OBJECTIVES:
        settings = load_config(SimulationSettings, defaults=defaults, flags={"algorithm": name})
        plan = settings.training.plan(name)
        assert plan.objective == name
        assert plan.hyperparameters == objective_of(name, {})[1]


@pytest.mark.parametrize(
    ("algorithm", "answers", "thumbs"),
    [
        ("dpo", 2, False),
        ("ipo", 2, False),
        ("ppo", 2, False),
        ("ppo-sequence", 2, False),
        ("rft", 2, False),
        ("grpo", 4, False),
        ("bco", 2, True),
    ],
)
def test_users_ask_and_rate_as_the_objective_needs(algorithm: str, answers: int, thumbs: bool) -> None:
    settings = load(algorithm=algorithm)
    assert (settings.answers_per_request, settings.thumbs) == (answers, thumbs)
    assert set(OBJECTIVES) == {"dpo", "ipo", "ppo", "ppo-sequence", "rft", "grpo", "bco"}


def test_a_groups_size_is_what_users_are_asked_to_compare() -> None:
    settings = load("training.hyperparameters.group_size=6", algorithm="grpo")
    assert settings.answers_per_request == 6
    assert settings.training.plan("grpo").hyperparameters["group_size"] == 6.0


def test_hyper_parameters_lie_over_the_objectives_defaults() -> None:
    settings = load("training.hyperparameters.kl_weight=0.5", algorithm="ppo")
    found = settings.training.plan("ppo").hyperparameters
    assert found == {**objective_of("ppo", {})[1], "kl_weight": 0.5}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--profile", "fast"], "unknown profile 'fast'; known profiles: dp, source"),
        (["--lora-mode", "both"], "lora_mode = 'both'"),
        (["--algorithm", "sft"], "not one of the objectives: bco, dpo, grpo, ipo, ppo, ppo-sequence, rft"),
        (["--set", "training.hyperparameters.gamma=1"], "no hyper-parameter 'gamma'; it has beta"),
        (["--set", "unit=user-level"], "unit = 'user-level'"),
        (["--set", "patience=-1"], "patience = -1"),
        (["--set", "balance=perhaps"], "balance = 'perhaps'"),
        (["--set", "min_samples=-1"], "min_samples = -1"),
        (["--set", "physical_batch=0"], "physical_batch"),
        (["--set", "training.lora_dropout=1"], "training.lora_dropout = 1"),
        (["--set", "training.nominal_units=0"], "training.nominal_units = 0"),
    ],
)
def test_a_setting_of_training_that_cannot_work_is_one_line(
    headwater: Headwater, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    run = headwater("simulate", *arguments, "--output", str(tmp_path / "out"))
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("headwater: ")
    assert run.stderr.count("\n") == 1
    assert expected in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_flags_reach_the_settings_a_run_is_made_with(
    headwater: Headwater, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SimulationSettings] = []

    def instead(settings: SimulationSettings, *_: object) -> None:
        seen.append(settings)
        raise ConfigError("enough")

    monkeypatch.setattr("deploy.simulate.simulate", instead)
    output = ("--output", str(tmp_path / "out"))
    headwater("simulate", "--profile", "source", "--lora-mode", "ffa", "--algorithm", "grpo", *output)
    headwater("simulate", "--quick", "--set", "balance=true", "--set", "patience=3", *output)
    source, quick = seen
    assert (source.lora_mode, source.algorithm, source.lora.alpha) == ("ffa", "grpo", 32.0)
    assert (quick.balance, quick.patience, quick.rounds) == (True, 3, QUICK["rounds"])


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "secagg_sketch"),
        ({"sites": 20}, "secagg_sketch"),
        ({"sites": 5}, "sealed"),
        ({"rule": "dnc"}, "sealed"),
        ({"drop": 0.1}, "sealed"),
        ({"slow": 0.1}, "sealed"),
        ({"grid": "ray"}, "sealed"),
        ({"unsafe_no_dp": True}, "sealed"),
        ({"aggregation": "sealed"}, "sealed"),
        ({"aggregation": "secagg"}, "secagg"),
        ({"aggregation": "secagg_sketch", "rule": "dnc", "drop": 0.1}, "secagg_sketch"),
    ],
)
def test_sketches_are_the_default_where_they_can_do_the_work(given: dict[str, Any], mode: str) -> None:
    settings = load(**given)
    assert settings.mode == mode
    assert settings.how == (mode if mode != "sealed" else f"sealed, rule {settings.rule_name}")
    assert settings.has_reference is (mode != "secagg")


def test_adapters_too_small_for_sketches_are_sealed_unless_somebody_asked(model: ModelFolder) -> None:
    small = load("lora.rank=2", "lora.alpha=4")
    assert small.mode == "secagg_sketch"
    assert with_room_for_sketches(small, model).mode == "sealed"
    assert with_room_for_sketches(load(), model) == load()
    with pytest.raises(ConfigError, match="of 8704 parameters is too small"):
        with_room_for_sketches(load("lora.rank=2", "lora.alpha=4", aggregation="secagg_sketch"), model)
