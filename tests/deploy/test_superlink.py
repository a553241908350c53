"""The same rounds over a real SuperLink with SuperNodes on loopback: other processes, HTTP, Flower's own states."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from aggregator.round_log import RoundLog
from edge_node.client_app import make_client_app
from model_hub.rollout import Stage
from tests.aggregator.test_hand_over import finishes_after
from tests.deploy.over_superlink import FOLDER, ROUNDS, START, hub_in, runners, sites_in

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "rounds"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.42.0"]

[tool.flwr.app]
publisher = "headwater"
fab-include = ["**/*.py", "LICENSE"]
fab-format-version = 1
flwr-version-target = "1.42.0"

[tool.flwr.app.components]
serverapp = "rounds.app:server_app"
clientapp = "rounds.app:client_app"

[tool.flwr.app.config]
"""
APP = """
from flwr.clientapp import ClientApp
from tests.deploy import over_superlink
server_app = over_superlink.server_app
client_app = ClientApp()  # never used: sites run what they have installed
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its children, ended by its own id."""
    with log.open("wb") as out:
        started = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield started
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(started.pid, how)
                started.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def wait_for(condition: object, *, timeout_s: float, what: str, logs: Path) -> None:
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.2)
    tails = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs.glob("*.log"))
    pytest.fail(f"no {what} within {timeout_s} s\n{tails}")


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_rounds_over_a_superlink(tmp_path: Path) -> None:
    sites = sites_in(tmp_path)
    sites[1].misbehave = finishes_after(1)
    link, *nodes = free_ports(4)
    secret = tmp_path / "superexec.secret"
    secret.write_bytes(secrets.token_bytes(32))
    secret.chmod(0o600)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        FOLDER: str(tmp_path),
    }
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    app = tmp_path / "app"
    (app / "rounds").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "rounds" / "__init__.py").touch()
    (app / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    (app / "rounds" / "app.py").write_text(APP)
    client_app = make_client_app(lambda context: sites[int(context.node_config["partition-id"])])
    warm = runners([f"127.0.0.1:{port}" for port in nodes], secret.read_bytes(), client_app)
    with ExitStack() as stack:
        superlink = [
            "flower-superlink", "--host", "127.0.0.1", "--port", str(link), "--insecure",
            "--database", str(tmp_path / "state.db"), "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        stack.enter_context(process(superlink, environment, tmp_path / "superlink.log"))
        wait_for(lambda: healthy(link), timeout_s=60, what="SuperLink", logs=tmp_path)
        for index, port in enumerate(nodes):
            supernode = [
                "flower-supernode", "--superlink", f"127.0.0.1:{link}", "--insecure", "--port", str(port),
                "--isolation", "process", "--superexec-auth-secret-file", str(secret),
                "--node-config", f"partition-id={index}",
            ]  # fmt: skip
            stack.enter_context(process(supernode, environment, tmp_path / f"supernode-{index}.log"))
        for port in nodes:
            wait_for(lambda port=port: healthy(port), timeout_s=60, what="SuperNode", logs=tmp_path)
        for runner in warm:
            runner.start()
            stack.callback(runner.stopping.set)
        submitted = subprocess.run(
            ["flwr", "run", str(app), "lab"], env=environment, capture_output=True, text=True, timeout=60
        )
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        wait_for((tmp_path / "result.json").exists, timeout_s=120, what="result", logs=tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    names = tuple(site.name for site in sites)
    assert [record["participants"] for record in found["records"]] == [list(names)] * ROUNDS
    assert [record["stage"] for record in found["records"]] == [Stage.STABLE] * ROUNDS
    assert any("waiting for site-2" in status for status in found["statuses"])
    assert all("train" in runner.handled for runner in warm)
    log, hub = RoundLog(tmp_path / "aggregator"), hub_in(tmp_path)
    plan = log.plan(1)
    mean = np.mean([site.update(plan).delta_D for site in sites], axis=0)
    moved = hub.adapter("v1").flatten(START.names("B"))
    np.testing.assert_allclose(moved, mean, atol=1e-6)
    assert all(len({plan.digest for plan in site.plans}) == ROUNDS for site in sites)  # one plan a round
    assert hub.stable.id == f"v{ROUNDS}"
    hub.close()
    log.close()
