"""Continuous batching: one thread turns waiting requests into batched engine steps.

Requests are grouped by the adapter version they were pinned to when they
arrived. An answer that is not finite fails alone; a step that fails takes down
the requests of its version; the thread never ends before `close`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from common.inference.engine import Engine, GenerationFailed, Lane, LoadedAdapter
from common.inference.sampling import SamplingParameters, sample

_KEPT_LANES = 3


@dataclass(frozen=True)
class GenerationRequest:
    """A tokenised prompt and how to continue it."""

    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParameters
    seed: int | None = None


@dataclass(frozen=True)
class Generation:
    """Tokens as served, end token included where it was drawn; log-probs as sampled.

    Times are seconds: waiting for a slot, prompt to first token, first token to last.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    wait_s: float
    first_token_s: float
    decode_s: float


@dataclass
class _Row:
    request: GenerationRequest
    future: Future[Generation]
    submitted: float
    rng: random.Random
    started: float = 0.0
    first_token: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class _Queue:
    adapter: LoadedAdapter
    waiting: deque[_Row] = field(default_factory=deque)
    rows: list[_Row] = field(default_factory=list)
    lane: Lane | None = None


class Batcher:
    """Owns the engine's thread; `submit` may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._queues: dict[str, _Queue] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="headwater-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, adapter: LoadedAdapter) -> Future[Generation]:
        future: Future[Generation] = Future()
        row = _Row(request, future, time.monotonic(), random.Random(request.seed))
        with self._changed:
            if self._closed:
                raise GenerationFailed("the engine is shutting down")
            queue = self._queues.pop(adapter.digest, None) or _Queue(adapter)
            self._queues[adapter.digest] = queue  # last: most recently used
            queue.waiting.append(row)
            self._changed.notify()
        return future

    def close(self) -> None:
        """Stop the thread; requests still open fail with GenerationFailed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not any(q.waiting or q.rows for q in self._queues.values()):
                    self._changed.wait()
                if self._closed:
                    self._fail_all(GenerationFailed("the engine is shutting down"))
                    return
                queues = list(self._queues.values())
            for queue in queues:
                if queue.waiting or queue.rows:
                    try:
                        self._advance(queue)
                    except Exception as error:  # outermost loop of this thread: fail the lane, keep serving
                        self._abandon(queue, error)
            self._forget_idle_lanes()

    def _advance(self, queue: _Queue) -> None:
        """Admit what fits, then decode one token for every row of one adapter."""
        before = len(queue.rows)
        admitted = self._admit(queue)
        queue.rows.extend(admitted)  # before anything can fail, so that no request is left unanswered
        if queue.lane is None:
            queue.lane = Lane(self.engine, queue.adapter)
        if admitted:
            started = time.monotonic()
            for row in admitted:
                row.started = started
            logits = queue.lane.prefill([row.request.prompt_ids for row in admitted])
            self._take_tokens(queue, logits, first=before)
        if queue.rows:
            logits = queue.lane.decode(np.array([row.token_ids[-1] for row in queue.rows], np.int64))
            self._take_tokens(queue, logits, first=0)

    def _admit(self, queue: _Queue) -> list[_Row]:
        admitted: list[_Row] = []
        free = self.engine.slots - len(queue.rows)
        with self._changed:
            while queue.waiting and len(admitted) < free:
                row = queue.waiting.popleft()
                if row.future.set_running_or_notify_cancel():
                    admitted.append(row)
        return admitted

    def _take_tokens(self, queue: _Queue, logits_NV: np.ndarray, *, first: int) -> None:
        """Sample one token for rows `first` onwards and end those that are done."""
        assert queue.lane is not None
        rows = queue.rows[first:]
        finite_N = np.isfinite(logits_NV).all(axis=1)
        tokens_N, logprobs_N = sample(
            np.where(finite_N[:, None], logits_NV, 0.0),
            [row.request.sampling for row in rows],
            np.array([row.rng.random() for row in rows]),
        )
        now = time.monotonic()
        for index in reversed(range(len(rows))):
            row = rows[index]
            if not finite_N[index]:
                self._end(queue, first + index)
                row.future.set_exception(GenerationFailed("the model's output is not finite"))
                continue
            row.first_token = row.first_token or now
            row.token_ids.append(int(tokens_N[index]))
            row.logprobs.append(float(logprobs_N[index]))
            ended = row.token_ids[-1] in self.engine.model.end_tokens
            if ended or len(row.token_ids) == row.request.max_tokens:
                self._end(queue, first + index)
                row.future.set_result(_generation(row, "stop" if ended else "length", now))

    def _end(self, queue: _Queue, index: int) -> None:
        assert queue.lane is not None
        queue.lane.drop(index)
        last = queue.rows.pop()
        if index < len(queue.rows):
            queue.rows[index] = last

    def _abandon(self, queue: _Queue, error: Exception) -> None:
        rows, queue.rows, queue.lane = queue.rows, [], None
        for row in rows:
            if not row.future.done():
                row.future.set_exception(GenerationFailed(f"the engine failed: {type(error).__name__}"))

    def _forget_idle_lanes(self) -> None:
        """Free the caches of versions nobody waits for, beyond the last few."""
        with self._changed:
            idle = [digest for digest, q in self._queues.items() if not q.waiting and not q.rows]
            for digest in idle[: max(0, len(self._queues) - _KEPT_LANES)]:
                del self._queues[digest]

    def _fail_all(self, error: Exception) -> None:
        for queue in self._queues.values():
            for row in [*queue.waiting, *queue.rows]:
                if not row.future.done():
                    row.future.set_exception(error)


def _generation(row: _Row, finish_reason: str, now: float) -> Generation:
    return Generation(
        token_ids=row.token_ids,
        logprobs=row.logprobs,
        finish_reason=finish_reason,
        wait_s=row.started - row.submitted,
        first_token_s=row.first_token - row.started,
        decode_s=now - row.first_token,
    )
