"""The site administrator's and the privacy officer's commands, on a real process."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import httpx2
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from openai import OpenAI

from aggregator.plan import make_plan
from common.accounting import PrivateSteps, epsilon
from common.identity import SealingKey, load_or_create_secret, load_or_create_signing_key
from common.inference.model_folder import ModelFolder
from deploy.founding import build_world
from deploy.settings import SimulationSettings
from deploy.world import Silent, World
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.training.checkpoints import Checkpoint, Checkpoints, TrainingRecord
from edge_node.training.ledger import Ledger
from edge_node.training.unit_gradients import FlatGradients
from tests.deploy.conftest import Headwater, Run

EVENT = PrivateSteps(2.0, 0.5, 2)


@pytest.fixture
def world(tmp_path: Path, model: ModelFolder) -> Iterator[World]:
    world = build_world(SimulationSettings(sites=3, attack="none"), model, tmp_path, Silent())
    yield world
    world.hub.close()


@pytest.fixture
def config(world: World, tmp_path: Path) -> Path:
    """An edge.toml as an administrator would write it."""
    site = world.setups[0].config
    lines = [f'{key} = "{getattr(site, key)}"' for key in ("federation", "name", "data_dir", "policy", "hub")]
    lines += [f'{key} = "{getattr(site, key)}"' for key in ("hub_key", "aggregator_key")]
    lines += ["selection_rate = 1.0", "[engine]", "slots = 2", "context_tokens = 64", "threads = 1"]
    file = tmp_path / "edge.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def charge(world: World, count: int) -> float:
    """Charges as training would write them; the ε they come to."""
    data = world.setups[0].config.data_dir
    ledger = Ledger(data / "ledger.sqlite", load_or_create_signing_key(data / "keys" / "identity.pem"))
    ledger.open_budget({"training": EVENT}, now_s=0.0, unit="trajectory")
    for number in range(count):
        ledger.reserve(
            "training", f"simulation/{number}", f"{number:064x}", epsilon_total=8.0, delta=1e-5, now_s=float(number)
        )
    ledger.close()
    return epsilon([EVENT] * count, delta=1e-5)


def test_a_node_serves_records_follows_the_hub_and_stops_when_told(world: World, config: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = Path(sys.executable).with_name("headwater")
    node = subprocess.Popen(
        [command, "edge", "run", "--config", config, "--set", f"port={port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                if httpx2.get(f"{url}/readyz").json()["version"] == "v0":
                    break
            except httpx2.TransportError:
                assert node.poll() is None, node.stderr.read() if node.stderr else ""
            time.sleep(0.2)
        client = OpenAI(base_url=f"{url}/v1", api_key="unused")
        answer = client.chat.completions.create(
            model="headwater", messages=[{"role": "user", "content": "What is 23+45?"}], max_tokens=30
        )
        assert answer.system_fingerprint == "v0"
    finally:
        node.send_signal(signal.SIGTERM)
        _, errors = node.communicate(timeout=30)
    assert "Traceback" not in errors
    assert list((world.setups[0].config.data_dir / "trajectories").glob("*.sqlite"))


def test_the_ledger_is_shown_and_verified(headwater: Headwater, world: World, config: Path) -> None:
    fresh = headwater("edge", "privacy", "show", "--config", str(config))
    assert "epsilon spent 0.00 of 8" in fresh.stdout
    assert "nothing was charged yet" in fresh.stdout
    spent = charge(world, 3)
    shown = headwater("edge", "privacy", "show", "--config", str(config), "--json")
    found = json.loads(shown.stdout)
    assert found["epsilon_spent"] == spent
    assert found["rounds_charged"] == 3
    assert found["epsilon_of_next_round"] == epsilon([EVENT] * 4, delta=1e-5) - spent
    assert headwater("edge", "privacy", "verify", "--config", str(config)).stdout.startswith("3 charges")


def test_a_budget_that_holds_no_further_round_is_said_before_it_is_tried(
    headwater: Headwater,
    world: World,
    config: Path,
) -> None:
    spent = charge(world, 2)
    policy = world.setups[0].config.policy
    policy.write_text(policy.read_text().replace("epsilon_total = 8.0", f"epsilon_total = {spent + 0.01}"))
    assert "the ledger will refuse it" in headwater("edge", "privacy", "show", "--config", str(config)).stdout


def test_what_does_not_hold_is_one_line(headwater: Headwater, world: World, config: Path, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        run = headwater(*arguments)
        assert run.returncode == 2
        assert run.stderr.count("\n") == 1
        return run.stderr

    assert "absent.toml" in refused("edge", "run", "--config", str(tmp_path / "absent.toml"))
    assert "did you mean 'port'" in refused("edge", "run", "--config", str(config), "--set", "prot=1")
    charge(world, 2)
    (world.setups[0].config.data_dir / "ledger.sqlite").write_bytes(b"edited")
    assert "damaged" in refused("edge", "privacy", "verify", "--config", str(config))
    world.setups[0].config.policy.unlink()
    assert "only serves" in refused("edge", "privacy", "show", "--config", str(config))
    moved = f"data_dir={tmp_path / 'nowhere'}"
    assert "holds no node" in refused("edge", "privacy", "verify", "--config", str(config), "--set", moved)
    assert not (tmp_path / "nowhere").exists()


def test_the_ledger_shows_how_many_rounds_are_left(headwater: Headwater, world: World, config: Path) -> None:
    fresh = json.loads(headwater("edge", "privacy", "show", "--config", str(config), "--json").stdout)
    assert fresh["unit"] == "trajectory"
    assert (fresh["rounds_charged"], fresh["rounds_left"], fresh["epsilon_of_next_round"]) == (0, None, None)
    charge(world, 3)
    possible = next(n for n in range(1, 1000) if epsilon([EVENT] * (n + 1), delta=1e-5) > 8.0)
    shown = json.loads(headwater("edge", "privacy", "show", "--config", str(config), "--json").stdout)
    assert shown["rounds_left"] == possible - 3 > 0
    text = " ".join(headwater("edge", "privacy", "show", "--config", str(config)).stdout.split())
    assert "3 rounds charged" in text
    assert f"{possible - 3} more fit the budget" in text


def test_a_plan_is_forecast_in_figures(headwater: Headwater, config: Path) -> None:
    arguments = ("edge", "privacy", "plan", "--config", str(config), "--units", "270", "--rounds", "5")
    run = headwater(*arguments, "--json")
    assert (run.returncode, run.stderr) == (0, "")
    found = json.loads(run.stdout)
    sigma = found["noise_multiplier"]

    def cost(rounds: int) -> float:
        return epsilon([PrivateSteps(sigma, 0.5, 2 * rounds), PrivateSteps(10.0, 1.0, rounds)], delta=1e-5)

    assert found["epsilon_of_first_round"] == pytest.approx(cost(1))
    assert found["epsilon_of_all_rounds"] == pytest.approx(cost(5))
    assert 7.9 < found["epsilon_of_all_rounds"] <= 8.0
    assert found["signal_to_noise"] == pytest.approx(10**0.5 * 0.5 * 270 / sigma)
    assert found["minutes"] > 0
    assert found["megabytes_up"] < found["megabytes_down"]
    assert found["refusal"] is None
    text = headwater(*arguments).stdout
    assert "5 rounds of 2 steps on about 270 units, epsilon 8 in all" in text
    assert f"{found['epsilon_of_all_rounds']:.2f}" in text
    assert f"{found['megabytes_up']:.1f} MB, {found['megabytes_down']:.1f} MB" in text


def test_a_plan_that_cannot_learn_anything_is_refused_with_what_could(headwater: Headwater, config: Path) -> None:
    def plan(units: int, *more: str) -> Run:
        arguments = ("--config", str(config), "--units", str(units), "--rounds", "50")
        return headwater("edge", "privacy", "plan", *arguments, *more)

    refused = plan(20)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    said = re.fullmatch(
        r"headwater: 20 trajectories over 50 rounds need epsilon ([\d.]+) to learn anything, the policy allows 8; "
        r"at least (\d+) trajectories are needed, or fewer rounds\n",
        refused.stderr,
    )
    assert said is not None
    assert float(said[1]) > 8.0
    assert "noise multiplier" in refused.stdout  # the figures are shown all the same
    as_json = plan(20, "--json")
    assert as_json.returncode == 2
    assert json.loads(as_json.stdout)["refusal"] == refused.stderr.removeprefix("headwater: ").strip()
    smallest = int(said[2])
    assert [plan(units, "--json").returncode for units in (smallest - 1, smallest)] == [2, 0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--units", "100", "--rounds", "5", "--objective", "nope"), "objective 'nope'; this site knows bco, dpo"),
        (("--units", "100", "--rounds", "5", "--set", "training.engine=fast"), "training.engine = 'fast'"),
        (("--units", "100", "--rounds", "5", "--set", "policy=/nowhere.toml"), "only serves"),
    ],
)
def test_a_plan_that_cannot_be_forecast_is_one_line(
    headwater: Headwater, config: Path, arguments: tuple[str, ...], expected: str
) -> None:
    run = headwater("edge", "privacy", "plan", "--config", str(config), *arguments)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert expected in run.stderr


def test_the_doctor_finds_the_embedded_model_sound(headwater: Headwater, config: Path) -> None:
    run = headwater("edge", "doctor", "--privacy", "--config", str(config))
    assert (run.returncode, run.stderr) == (0, "")
    for check in ("per-unit gradients", "noise off", "sensitivity", "empty batch", "save and reload"):
        assert check in run.stdout
    assert run.stdout.count("pass") == 6
    assert "FAIL" not in run.stdout


def test_the_doctor_says_what_fails_and_ends_in_code_two(
    headwater: Headwater, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FlatGradients._accumulate
    monkeypatch.setattr(FlatGradients, "_accumulate", lambda self, index, x, grad: real(self, index, x * 1.01, grad))
    run = headwater("edge", "doctor", "--privacy", "--config", str(config), "--json")
    assert run.returncode == 2
    checks = {check["name"]: check for check in json.loads(run.stdout)}
    assert not checks["per-unit gradients"]["passed"]
    assert checks["per-unit gradients"]["figure"] > checks["per-unit gradients"]["limit"]
    assert checks["sensitivity"]["passed"]


def test_the_doctor_refuses_an_objective_it_does_not_know(headwater: Headwater, config: Path) -> None:
    run = headwater("edge", "doctor", "--config", str(config), "--objective", "nope")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1


GOOD = [
    {
        "messages": [
            {"role": "user", "content": "What is 2+2? Write to bob@example.com"},
            {"role": "assistant", "content": "4"},
        ],
        "rating": 1.0,
    },
    {"prompt": "What is 3+4?", "chosen": "7", "rejected": "8"},
]


def stored(world: World) -> list[Trajectory]:
    data = world.setups[0].config.data_dir
    store = TrajectoryStore(data / "trajectories", load_or_create_secret(data / "keys" / "trajectories.key"))
    try:
        return list(store.read(after_s=0.0, until_s=4e9))
    finally:
        store.close()


def write_lines(file: Path, lines: list[object]) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_records_of_another_system_are_imported_redacted_and_once(
    headwater: Headwater, world: World, config: Path, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "chats.jsonl", GOOD)
    run = headwater("edge", "import", "--config", str(config), str(file))
    assert (run.returncode, run.stdout, run.stderr) == (0, "3 records imported\n", "")
    first = stored(world)
    assert len(first) == 3
    assert not any(b"bob@example.com" in trajectory.SerializeToString() for trajectory in first)
    again = headwater("edge", "import", "--config", str(config), str(file))
    assert again.returncode == 2
    assert again.stderr.startswith("headwater: ")
    assert again.stderr.count("\n") == 1
    assert [t.id for t in stored(world)] == [t.id for t in first]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps(GOOD[1]).encode() + b'\n{"foo": 1}\n', "line 2: has none of these sets of keys"),
        (b"not json\n", "line 1: not JSON"),
        (b'{"messages": []}\n', "line 1: messages"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_imported_changes_nothing(
    headwater: Headwater, world: World, config: Path, tmp_path: Path, content: bytes | None, expected: str
) -> None:
    file = tmp_path / "bad.jsonl"
    if content is not None:
        file.write_bytes(content)
    run = headwater("edge", "import", "--config", str(config), str(file))
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert expected in run.stderr
    assert stored(world) == []


def interrupted(world: World, *rounds: int) -> list[str]:
    """Rounds whose training stopped after some checkpoints; digests of their plans."""
    checkpoints = Checkpoints(world.setups[0].config.data_dir / "checkpoints")
    digests = []
    for number in rounds:
        plan = make_plan(
            world.federation,
            world.hub.stable,
            world.hub.adapter("v0"),
            number=number,
            sealing_key=SealingKey(X25519PrivateKey.generate()),
            now_s=world.clock(),
        )
        record = TrainingRecord(
            plan=asdict(plan),
            plan_digest=plan.digest,
            ledger_entry="e" * 64,
            noise_multiplier=1.25,
            unit="trajectory",
            data_after_s=0.0,
            data_until_s=1.0,
            precision="float32",
            libraries={},
        )
        for step in (100, 200, 300):
            checkpoints.save(Checkpoint(step, record, {"x": np.zeros(2, np.float32)}))
        digests.append(plan.digest)
    return digests


def test_checkpoints_are_listed_and_training_goes_on_from_the_one_that_was_chosen(
    headwater: Headwater, world: World, config: Path
) -> None:
    def command(*more: str) -> Run:
        return headwater("edge", "checkpoints", "--config", str(config), *more)

    assert command().stdout == "no round was interrupted\n"
    refused = command("--resume-from", "100")
    assert (refused.returncode, refused.stderr) == (
        2,
        "headwater: --resume-from needs one interrupted round, there are 0\n",
    )
    (digest,) = interrupted(world, 2)
    kept = Checkpoints(world.setups[0].config.data_dir / "checkpoints")
    listed = command()
    assert listed.returncode == 0
    for shown in (digest[:12], "100", "200", "300", "1.25", "float32"):
        assert shown in listed.stdout
    wrong = command("--resume-from", "150")
    assert wrong.returncode == 2
    assert wrong.stderr == "headwater: there is no checkpoint at step 150; there are [100, 200, 300]\n"
    assert kept.steps(digest) == [100, 200, 300]
    assert "300" not in command("--resume-from", "200").stdout
    assert kept.steps(digest) == [100, 200]
    (file,) = (world.setups[0].config.data_dir / "checkpoints").glob("*/step-*200.safetensors")
    file.write_bytes(b"damaged")
    assert "damaged" in command().stdout


def test_of_two_interrupted_rounds_none_is_chosen(headwater: Headwater, world: World, config: Path) -> None:
    digests = interrupted(world, 1, 2)
    run = headwater("edge", "checkpoints", "--config", str(config), "--resume-from", "100")
    assert run.returncode == 2
    assert "needs one interrupted round, there are 2" in run.stderr
    kept = Checkpoints(world.setups[0].config.data_dir / "checkpoints")
    assert [kept.steps(digest) for digest in digests] == [[100, 200, 300]] * 2


@pytest.mark.parametrize("command", [("checkpoints",), ("import", "FILE")])
def test_a_folder_without_a_node_is_not_made_one(
    headwater: Headwater, config: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = write_lines(tmp_path / "chats.jsonl", GOOD)
    arguments = [str(file) if argument == "FILE" else argument for argument in command]
    moved = f"data_dir={tmp_path / 'nowhere'}"
    run = headwater("edge", *arguments, "--config", str(config), "--set", moved)
    assert run.returncode == 2
    assert "holds no node" in run.stderr
    assert not (tmp_path / "nowhere").exists()


def test_what_a_round_would_train_on_is_counted_for_the_sites_own_people(
    headwater: Headwater, world: World, config: Path, tmp_path: Path
) -> None:
    empty = headwater("edge", "data", "--config", str(config))
    assert empty.returncode == 2
    assert "nothing here can be trained on with dpo" in empty.stderr
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"What is {n}+2?", "chosen": "7", "rejected": "8"}) + "\n" for n in range(3))
    )
    assert headwater("edge", "import", "--config", str(config), str(file)).returncode == 0
    assert headwater("edge", "data", "--config", str(config)).stdout.startswith("3 units for dpo")
    for_ppo = headwater("edge", "data", "--config", str(config), "--objective", "ppo")
    assert (for_ppo.returncode, for_ppo.stdout.splitlines()[1]) == (2, "  left out, no reward: 6")
    assert (
        headwater("edge", "privacy", "show", "--config", str(config), "--json").stdout.count('"rounds_charged": 0') == 1
    )


def test_a_plan_of_more_rounds_than_a_budget_in_use_still_holds_is_refused(
    headwater: Headwater, world: World, config: Path
) -> None:
    charge(world, 2)
    found = json.loads(headwater("edge", "privacy", "show", "--config", str(config), "--json").stdout)
    more = str(found["rounds_left"] + 1)
    run = headwater("edge", "privacy", "plan", "--config", str(config), "--units", "5000", "--rounds", more)
    assert run.returncode == 2
    assert f"its schedule has {found['rounds_left']} more rounds, not {more}" in run.stderr


def test_a_base_of_lower_precision_needs_the_engine_that_shares_nothing(headwater: Headwater, config: Path) -> None:
    run = headwater("edge", "data", "--config", str(config), "--set", "training.precision=bfloat16")
    assert run.returncode == 2
    assert "needs engine one-unit" in run.stderr


def test_a_plan_beside_a_budget_in_use_has_its_noise_and_its_schedule(
    headwater: Headwater, world: World, config: Path
) -> None:
    charge(world, 1)
    plan = ("edge", "privacy", "plan", "--config", str(config), "--units", "5000", "--rounds", "1", "--json")
    assert json.loads(headwater(*plan).stdout)["noise_multiplier"] == EVENT.noise_multiplier
    other = headwater(*plan, "--steps", "3")
    assert other.returncode == 2
    assert "fixed at 2 steps with sampling rate 0.5" in other.stderr
