"""Watches an agent's calls, judges those that are selected, and tells the node.

Business code stays as it is: `start` begins to watch, `stop` ends it. Whatever fails
here, a business call does not notice.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import queue
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol

from common.errors import HeadwaterError
from common.telemetry import log_event
from edge_node.collecting.selection import Decision, SamplingRate, Undecided
from edge_node.runner.calls import AgentCall, endpoint_of
from edge_node.runner.hooks import HOOKS
from edge_node.runner.node_client import NodeClient

logger = logging.getLogger("headwater.runner")


class CallSelection(Protocol):
    """Which calls are judged; the strategies of a node that do not look at the answer work here too."""

    def decide(self, call: AgentCall, /) -> Decision | Undecided: ...


RewardCalculator = Callable[[AgentCall], float | Awaitable[float]]

_STOP_S = 10.0
_REMEMBERED_TASKS = 10_000


class TrainingRunner:
    """Trains on what this process's agents do.

    Args:
        endpoint: the node's URL, with or without /v1; only requests to it are watched.
        model_name: only requests that name this model, or an arm of it; None for any.
        selection_strategy: which calls are judged; 10 % of them by default. It is asked when a call has ended; a call
            that is undecided is not selected.
        reward_calculator: how good a call was; asked once for each selected call, on a thread of the runner's. May be
            a coroutine function. By default the site's own default reward is given.
        commit_interval_s: between commits; 0 or less for none while running.
        api_key: of a node that asks for one; with scope `feedback`.
        timeout_s: of a request to the node.
        auto_commit: commit in intervals and at the end; else only `commit` does.
        workers: threads that judge and post.
        capacity: calls that may wait to be judged; more are left out.
    Raises:
        ValueError: the endpoint is no URL, or a number makes no sense.
    """

    def __init__(
        self,
        endpoint: str = "http://127.0.0.1:8010",
        *,
        model_name: str | None = None,
        selection_strategy: CallSelection | None = None,
        reward_calculator: RewardCalculator | None = None,
        commit_interval_s: float = 300.0,
        api_key: str = "dummy",
        timeout_s: float = 300.0,
        auto_commit: bool = True,
        workers: int = 4,
        capacity: int = 1000,
    ) -> None:
        if not (timeout_s > 0 and math.isfinite(commit_interval_s)) or workers < 1 or capacity < 1:
            raise ValueError("timeout_s, workers and capacity must be positive and commit_interval_s a number")
        self.endpoint = endpoint_of(endpoint)
        self._url = endpoint.rstrip("/").removesuffix("/v1")
        self._model_name = model_name
        self._strategy: CallSelection = selection_strategy if selection_strategy is not None else SamplingRate(0.1)
        self._reward_calculator = reward_calculator
        self._commit_interval_s = commit_interval_s
        self._api_key, self._timeout_s = api_key, timeout_s
        self._auto_commit = auto_commit
        self._workers, self._capacity = workers, capacity
        self._state = threading.Lock()
        self._session: _Session | None = None

    @property
    def running(self) -> bool:
        return self._session is not None

    def start(self) -> None:
        """Begin to watch; does nothing where it is running. Import AgentScope before, where it is used."""
        with self._state:
            if self._session is None:
                client = NodeClient(self._url, api_key=self._api_key, timeout_s=self._timeout_s)
                self._session = _Session(self, client)
                HOOKS.watch(self)

    def stop(self) -> None:
        """Judge what is left, for at most 10 s, commit, and stop watching; does nothing where it is not running."""
        with self._state:
            session, self._session = self._session, None
            if session is None:
                return
            try:
                session.close(commit=self._auto_commit)
            finally:
                HOOKS.unwatch(self)

    def commit(self) -> None:
        """Tell the node that nothing more will be said about the answers so far.

        Raises:
            TransportError: the node did not take it.
        """
        with NodeClient(self._url, api_key=self._api_key, timeout_s=self._timeout_s) as client:
            client.commit()

    def __enter__(self) -> TrainingRunner:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> TrainingRunner:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def finished(self, call: AgentCall) -> None:
        """A call ended; called by the hooks."""
        session = self._session
        if session is not None and self._own(call):
            session.take(call)

    def _own(self, call: AgentCall) -> list[str]:
        """Ids of the call's responses that this runner watches."""
        return [r.id for r in call.responses if r.endpoint == self.endpoint and self._is_model(r.model)]

    def _is_model(self, name: str) -> bool:
        wanted = self._model_name
        return wanted is None or name == wanted or name.startswith(f"{wanted}/")

    def judge(self, call: AgentCall, client: NodeClient, run_id: Callable[[str], str]) -> None:
        """Select, reward and tell; raises whatever a strategy, a calculator or the node does."""
        decision = self._strategy.decide(call)
        if not isinstance(decision, Decision) or not decision.accepted:
            return
        reward = None if self._reward_calculator is None else _value(self._reward_calculator(call))
        named = call.marking.task_id if call.marking is not None else ""
        task_id = named or uuid.uuid4().hex
        run = (call.marking.run_id if call.marking is not None else "") or run_id(task_id)
        client.feedback(self._own(call), reward, task_id=task_id, run_id=run, labels=decision.labels)


def _value(reward: float | Awaitable[float]) -> float:
    """A number, whatever kind of function gave it.

    Raises:
        ValueError: it is not a finite number.
    """
    value = asyncio.run(_awaited(reward)) if inspect.isawaitable(reward) else reward
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("the reward calculator gave a number that is not finite")
    return number


async def _awaited(reward: Awaitable[float]) -> float:
    return await reward


class _Session:
    """The threads of a running runner: some judge, one commits. All are daemons: none keeps a process alive."""

    def __init__(self, runner: TrainingRunner, client: NodeClient) -> None:
        self._runner = runner
        self._client = client
        self._calls: queue.Queue[AgentCall] = queue.Queue(runner._capacity)
        self._closing = threading.Event()
        self._open = 0
        self._idle = threading.Condition()
        self._runs: OrderedDict[str, int] = OrderedDict()
        for number in range(runner._workers):
            threading.Thread(target=self._judge, name=f"training-runner-{number}", daemon=True).start()
        if runner._auto_commit and runner._commit_interval_s > 0:
            threading.Thread(target=self._commit, name="training-runner-commit", daemon=True).start()

    def take(self, call: AgentCall) -> None:
        """Have it judged, unless too many wait."""
        if self._closing.is_set():
            return
        with self._idle:
            self._open += 1
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._done()
            log_event(logger, "call left out", reason="too many wait to be judged")

    def close(self, *, commit: bool) -> None:
        """Wait for what was taken, for at most 10 s in all, and commit."""
        until = time.monotonic() + _STOP_S
        self._closing.set()
        with self._idle:
            if not self._idle.wait_for(lambda: self._open == 0, timeout=_STOP_S):
                log_event(logger, "calls left out", reason="the runner was stopped", count=self._open)
        if commit:
            self._quietly("commit failed", lambda: self._client.commit(timeout_s=max(1.0, until - time.monotonic())))
        if self._open == 0:
            self._client.close()

    def _judge(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=0.1)
            except queue.Empty:
                if self._closing.is_set():
                    return
                continue
            self._quietly("call not judged", lambda call=call: self._runner.judge(call, self._client, self._run_id))  # type: ignore[misc]
            self._done()

    def _done(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def _commit(self) -> None:
        while not self._closing.wait(self._runner._commit_interval_s):
            self._quietly("commit failed", self._client.commit)

    def _run_id(self, task_id: str) -> str:
        """How often this task was done before."""
        with self._idle:
            run = self._runs.pop(task_id, 0)
            self._runs[task_id] = run + 1
            while len(self._runs) > _REMEMBERED_TASKS:
                self._runs.popitem(last=False)
        return str(run)

    @staticmethod
    def _quietly(event: str, work: Callable[[], None]) -> None:
        try:
            work()
        except HeadwaterError as error:
            log_event(logger, event, error=type(error).__name__, reason=str(error))
        except BaseException as error:  # a calculator may even exit; an error's text may quote the conversation
            log_event(logger, event, error=type(error).__name__)
