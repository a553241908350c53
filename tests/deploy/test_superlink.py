"""The same rounds over a real SuperLink with SuperNodes on loopback: other processes, HTTP, Flower's own states."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from flwr.clientapp import ClientApp

from aggregator.round_log import RoundLog
from deploy.simulated_site import close_sites, make_simulated_client_app
from edge_node.client_app import make_client_app
from model_hub.rollout import Stage
from tests.aggregator.test_hand_over import finishes_after
from tests.deploy.over_superlink import FOLDER, ROUNDS, SMALL, START, WarmRunner, hub_in, runners, sites_in

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
server_app = over_superlink.{server_app}
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


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


class Lab:
    """A SuperLink with SuperNodes in processes of their own, their ports and logs under one folder."""

    def __init__(self, folder: Path, nodes: int, server_app: str) -> None:
        self._folder = folder
        self._link, *self._nodes = free_ports(nodes + 1)
        self._secret = folder / "superexec.secret"
        self._secret.write_bytes(secrets.token_bytes(32))
        self._secret.chmod(0o600)
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            FOLDER: str(folder),
        }
        (folder / "flwr").mkdir()
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:{self._link}"\ninsecure = true\n'
        )
        self._app = folder / "app"
        (self._app / "rounds").mkdir(parents=True)
        (self._app / "pyproject.toml").write_text(PYPROJECT)
        (self._app / "rounds" / "__init__.py").touch()
        (self._app / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
        (self._app / "rounds" / "app.py").write_text(APP.format(server_app=server_app))

    @contextmanager
    def up(self) -> Iterator[None]:
        """Everything runs until the end of the block; the ServerApp from its beginning."""
        with ExitStack() as stack:
            superlink = [
                "flower-superlink", "--host", "127.0.0.1", "--port", str(self._link), "--insecure",
                "--database", str(self._folder / "state.db"), "--disable-runtime-dependency-installation",
            ]  # fmt: skip
            stack.enter_context(process(superlink, self._environment, self._folder / "superlink.log"))
            self.wait_for(lambda: healthy(self._link), timeout_s=60, what="SuperLink")
            for index, port in enumerate(self._nodes):
                supernode = [
                    "flower-supernode", "--superlink", f"127.0.0.1:{self._link}", "--insecure", "--port", str(port),
                    "--isolation", "process", "--superexec-auth-secret-file", str(self._secret),
                    "--node-config", f"partition-id={index}",
                ]  # fmt: skip
                log = self._folder / f"supernode-{index}.log"
                stack.enter_context(process(supernode, self._environment, log))
            for port in self._nodes:
                self.wait_for(lambda port=port: healthy(port), timeout_s=120, what="SuperNode")
            submitted = subprocess.run(
                ["flwr", "run", str(self._app), "lab"],
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert submitted.returncode == 0, submitted.stdout + submitted.stderr
            yield

    @contextmanager
    def answered_by(self, app: ClientApp) -> Iterator[list[WarmRunner]]:
        """The nodes' messages are answered by `app`, as it is installed here."""
        warm = runners([f"127.0.0.1:{port}" for port in self._nodes], self._secret.read_bytes(), app)
        for runner in warm:
            runner.start()
        try:
            yield warm
        finally:
            for runner in warm:
                runner.stopping.set()
            for runner in warm:
                runner.join(30)

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            if condition():
                return
            time.sleep(0.2)
        logs = self._folder.glob("*.log")
        tails = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
        pytest.fail(f"no {what} within {timeout_s} s\n{tails}")


@pytest.mark.slow
def test_rounds_over_a_superlink(tmp_path: Path) -> None:
    sites = sites_in(tmp_path)
    sites[1].misbehave = finishes_after(1)
    lab = Lab(tmp_path, len(sites), "server_app")
    client_app = make_client_app(lambda context: sites[int(context.node_config["partition-id"])])
    with lab.up(), lab.answered_by(client_app) as warm:
        lab.wait_for((tmp_path / "result.json").exists, timeout_s=120, what="result")
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


@pytest.mark.slow
def test_real_nodes_train_and_are_summed_unseen_over_a_superlink(tmp_path: Path) -> None:
    """Users, exams, private training, sketches, unmasking, golden answers and the new version, all by messages."""
    lab = Lab(tmp_path, SMALL.sites, "federation_app")
    handed_over = tmp_path / "setups.pickle"
    with lab.up():
        lab.wait_for(handed_over.exists, timeout_s=120, what="federation")
        setups = pickle.loads(handed_over.read_bytes())
        try:
            with lab.answered_by(make_simulated_client_app(setups)):
                lab.wait_for((tmp_path / "result.json").exists, timeout_s=300, what="result")
        finally:
            close_sites(setups)
    found = json.loads((tmp_path / "result.json").read_text())
    (record,) = found["records"]
    assert record["participants"] == [f"site-{number}" for number in range(1, SMALL.sites)]
    assert [refusal["site"] for refusal in record["refused"]] == [f"site-{SMALL.sites}"]
    assert record["stage"] in (Stage.STABLE, Stage.ROLLED_BACK)  # after one round of so little data either may be
    assert found["distances"] == [pytest.approx(0, abs=1e-3)]  # what was summed unseen is the honest sites' mean
    assert found["served"] == ["v0", record["version"] if record["stage"] == Stage.STABLE else "v0"]
    assert all(0 < epsilon <= SMALL.epsilon for epsilon in found["epsilons"].values())
