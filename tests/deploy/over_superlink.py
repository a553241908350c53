"""Both ends of rounds over a real SuperLink: what its ServerApp process runs, and a warm runner for SuperNodes.

The ServerApp and ClientApp are the production ones. `server_app` has sites that are stubs and hand over updates
without a model, so that a test can make one late; `federation_app` has a whole small federation of real nodes.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.serverapp import Grid
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from aggregator.round_log import RoundLog
from aggregator.server_app import make_server_app, run_rounds
from aggregator.witness import Witness
from common.adapter import LoraShape, initial_adapter
from common.identity import SigningKey, load_or_create_signing_key, replace_file
from common.inference.model_folder import open_model
from deploy.founding import build_world
from deploy.settings import SimulationSettings, TrainingSettings
from deploy.simulate import run_federation
from deploy.world import Silent
from model_hub.evidence import Thresholds
from model_hub.hub import Hub
from tests.aggregator.stub import BASE, StubSite, federation_of

FOLDER = "HEADWATER_TEST_FOLDER"
ROUNDS = 1
SMALL = SimulationSettings(
    sites=5,
    attack="scale:1",
    aggregation="secagg_sketch",
    rounds=1,
    requests_per_round=20,
    exam_problems=2,
    min_samples=0,
    training=TrainingSettings(nominal_units=15.0),
    drills=False,
)
START = initial_adapter({"model.layers.0.self_attn.q_proj": (6, 5)}, LoraShape(2, 4.0, ("q_proj",)), seed=0)


def sites_in(folder: Path) -> list[StubSite]:
    """The federation's three sites; the aggregator's process uses their public keys only."""
    return [
        StubSite(name, START, key=key_in(folder, name), aggregator=key_in(folder, "aggregator"))
        for name in ("site-1", "site-2", "site-3")
    ]


def key_in(folder: Path, name: str) -> SigningKey:
    return load_or_create_signing_key(folder / "keys" / f"{name}.pem")


def hub_in(folder: Path) -> Hub:
    return Hub(
        folder / "hub",
        key_in(folder, "hub"),
        base_model="m",
        clock=time.time,
        thresholds=Thresholds(minimum_time_s=0.0),
    )


def _aggregate(grid: Grid) -> None:
    folder = Path(os.environ[FOLDER])
    statuses: list[str] = []
    with closing(hub_in(folder)) as hub, closing(RoundLog(folder / "aggregator")) as log:
        hub.found(START, base_digest=BASE)
        records = run_rounds(
            grid,
            federation_of(
                sites_in(folder), rule="mean", rounds=ROUNDS, timeout_s=120.0, key=key_in(folder, "aggregator")
            ),
            hub,
            Witness(folder / "aggregator" / "witness.json"),
            log,
            clock=time.time,
            wait=lambda reason: None,
            on_status=lambda status: statuses.append(str(status)),
        )
    found = {"records": [asdict(record) for record in records], "statuses": statuses}
    replace_file(folder / "result.json", json.dumps(found).encode())


def _federate(grid: Grid) -> None:
    folder = Path(os.environ[FOLDER])
    torch.set_num_threads(1)
    (folder / "world").mkdir()
    world = build_world(SMALL, open_model(SMALL.model), folder / "world", Silent())
    replace_file(folder / "setups.pickle", pickle.dumps(world.setups))
    with closing(world):
        run_federation(world, grid)
    found = {
        "records": [asdict(record) for record in world.rounds],
        "distances": list(world.distances.values()),
        "served": [exam.version for exam in world.exams],
        "epsilons": dict(world.exams[-1].epsilons),
    }
    replace_file(folder / "result.json", json.dumps(found).encode())


server_app = make_server_app(_aggregate)
federation_app = make_server_app(_federate)


class WarmRunner(threading.Thread):
    """Runs the ClientApp installed here for a SuperNode's messages, whatever code came with them."""

    def __init__(self, address: str, secret: bytes, app: ClientApp) -> None:
        super().__init__(name=f"runner-{address}", daemon=True)
        self._address, self._secret, self._app = address, secret, app
        self.stopping = threading.Event()
        self.handled: list[str] = []

    def run(self) -> None:
        protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        acquiring = self._client(
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods=protected),
        )
        while not self.stopping.wait(0.25):
            task = acquiring.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
            if task.HasField("task") and task.token:
                self._handle(task.token)

    def _handle(self, token: str) -> None:
        client = self._client(
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), RuntimeTokenHttpInterceptor(token)
        )
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
        message, context, _, _ = pull_task_input(client)
        self.handled.append(message.metadata.message_type)
        try:
            reply = self._app(message=message, context=context)
        except Exception as error:
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client=client, context=context, sub_status=SubStatus.COMPLETED, details="")
        heartbeat.stop()
        client.close()

    def _client(self, *interceptors: object) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            self._address,
            True,
            None,
            interceptors=list(interceptors),
            retry_invoker=make_simple_http_retry_invoker(),
        )


def runners(addresses: Sequence[str], secret: bytes, app: ClientApp) -> list[WarmRunner]:
    return [WarmRunner(address, secret, app) for address in addresses]
