"""A Flower grid in this process: threads instead of machines, no sockets.

The unmodified ServerApp and ClientApp run on it; one message at a time per node,
as a SuperNode does it. Messages are copied on the way, so neither side can see
the other's objects. Faults can be put in: nodes out of reach, messages lost on the
way there or back, replies that come twice.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from common.identity import remember_verified

_SERVER_NODE_ID, FIRST_NODE_ID = 1, 1000
_POLL_S = 0.005
_VERIFIED_A_NODE = 1 << 8
"""Signatures remembered: every one of a secure round, which the server verifies and so does each site it is for."""


class Fault(Enum):
    """What may happen to a message on its way."""

    UNREACHABLE = "the node is away; the sender is told"
    LOST = "it never arrives, and nobody is told"
    NO_REPLY = "it arrives, its reply does not; the sender is told that the node left"
    TWICE = "it arrives twice, and so does its reply"


Faults = Callable[[Message], Fault | None]


class LocalGrid(Grid):
    """Runs `nodes` copies of a ClientApp on a thread pool.

    Node i sees `partition-id` i in its node config, as in Flower's simulation.

    Args:
        faults: what happens to a message; asked once for each, in the thread that delivers it.
    """

    def __init__(
        self, client_app: ClientApp, nodes: int, *, workers: int, faults: Faults = lambda message: None
    ) -> None:
        remember_verified(nodes * _VERIFIED_A_NODE)
        run_id = uuid.uuid4().int >> 65
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, _SERVER_NODE_ID, 1
        self._app = client_app
        self._faults = faults
        self._run = Run.create_empty(run_id)
        self._contexts = {
            FIRST_NODE_ID + index: Context(
                run_id=run_id,
                node_id=FIRST_NODE_ID + index,
                node_config={"partition-id": index, "num-partitions": nodes},
                state=RecordDict(),
                run_config={},
            )
            for index in range(nodes)
        }
        self._one_at_a_time = {node: threading.Lock() for node in self._contexts}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="site")
        self._replies: dict[str, Message] = {}
        self._lock = threading.Lock()

    def serve(self, server_app: ServerApp) -> None:
        """Run a ServerApp on this grid; what it raises is raised here."""
        context = Context(
            run_id=self._run.run_id, node_id=_SERVER_NODE_ID, node_config={}, state=RecordDict(), run_config={}
        )
        server_app(self, context)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
        **_: Any,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def get_nodes(self) -> Iterable[Any]:
        raise NotImplementedError("a local grid has no registered nodes; sites prove their names by message")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            _stamp(message)
            ids.append(message.metadata.message_id)
            self._pool.submit(self._deliver, _copied(message))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        with self._lock:
            return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        waiting = set(self.push_messages(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and (deadline is None or time.monotonic() < deadline):
            for reply in self.pull_messages(waiting):
                replies.append(reply)
                waiting.discard(reply.metadata.reply_to_message_id)
            if waiting:
                time.sleep(_POLL_S)
        return replies

    def _deliver(self, message: Message) -> None:
        fault = self._faults(message)
        if fault is Fault.LOST:
            return
        if fault is not Fault.UNREACHABLE:
            reply = self._answer(message)
        if fault is Fault.TWICE:
            self._arrived(reply)
            reply = self._answer(message)
        if fault in (Fault.UNREACHABLE, Fault.NO_REPLY):
            reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=message)
        self._arrived(reply)

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        with self._one_at_a_time[node]:
            try:
                return self._app(message=message, context=self._contexts[node])
            except BaseException as error:  # what a SuperNode does with a ClientApp that raises
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=message)

    def _arrived(self, reply: Message) -> None:
        _stamp(reply)
        with self._lock:
            self._replies[reply.metadata.reply_to_message_id] = reply


def _stamp(message: Message) -> None:
    """Give a message its id, as a SuperLink does on arrival."""
    message.metadata.__dict__["_message_id"] = str(uuid.uuid4())


def _copied(message: Message) -> Message:
    return Message(metadata=message.metadata, content=copy.deepcopy(message.content))
