"""Both ends of rounds over a real SuperLink: what its ServerApp process runs, and a warm runner for SuperNodes.

The ServerApp and ClientApp are the production ones. Sites are stubs that hand over
updates without a model, so that the test is about messages and processes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

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
from common.identity import SigningKey, load_or_create_signing_key
from model_hub.evidence import Thresholds
from model_hub.hub import Hub
from tests.aggregator.stub import BASE, StubSite, federation_of

FOLDER = "HEADWATER_TEST_FOLDER"
ROUNDS = 1
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
    hub, log = hub_in(folder), RoundLog(folder / "aggregator")
    hub.found(START, base_digest=BASE)
    statuses: list[str] = []
    records = run_rounds(
        grid,
        federation_of(sites_in(folder), rule="mean", rounds=ROUNDS, timeout_s=120.0, key=key_in(folder, "aggregator")),
        hub,
        Witness(folder / "aggregator" / "witness.json"),
        log,
        clock=time.time,
        wait=lambda reason: None,
        on_status=lambda status: statuses.append(str(status)),
    )
    found = {"records": [asdict(record) for record in records], "statuses": statuses}
    (folder / "result.partial").write_text(json.dumps(found))
    (folder / "result.partial").replace(folder / "result.json")


server_app = make_server_app(_aggregate)


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
        while not self.stopping.wait(0.05):
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
