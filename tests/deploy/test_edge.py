"""The site administrator's and the privacy officer's commands, on a real process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from common.accounting import PrivateSteps, epsilon
from common.identity import load_or_create_signing_key
from common.inference.model_folder import ModelFolder
from deploy.settings import SimulationSettings
from deploy.simulate import build_world
from deploy.world import Silent, World
from edge_node.training.ledger import Ledger
from tests.deploy.conftest import Headwater

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
    ledger.open_budget({"training": EVENT}, now_s=0.0)
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
