"""Continuous batching: one thread turns waiting requests into batched engine steps.

Requests are grouped by the adapter version they were pinned to when they
arrived. A prompt is read in chunks between the steps of the answers beside it, so
a long one delays them by a chunk at a time. An answer that is not finite, whose constraint breaks or whose watcher
raises fails alone; a step that fails takes down the requests of its version; the
thread never ends before `close`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from common.errors import TransportError
from common.inference.constraints import Constraint
from common.inference.engine import Engine, GenerationFailed, Lane, LoadedAdapter
from common.inference.sampling import SamplingParameters, sample
from common.inference.sampling import Token as Token

_KEPT_LANES = 3
_IDLE_S = 30.0
"""After this a lane nobody uses gives its cache back."""
_CHUNK_TOKENS = 128
"""Of prompt between two decode steps; smaller ones wait less and cost more for each token."""

Watch = Callable[[Token], str | None]
"""Sees each token on the engine's thread, so it must be quick; a finish reason it returns ends the answer there."""


class Overloaded(TransportError):
    """As many requests wait as may; try again later."""


@dataclass(frozen=True)
class GenerationRequest:
    """A tokenised prompt and how to continue it.

    Attributes:
        seed: same seed, prompt, sampling and adapter: same answer; None draws anew.
        top_logprobs: how many of the likeliest tokens to report at each position.
        constraint: what the answer must look like; it holds the answer's state, so every request needs its own.
        watch: sees each token as it is drawn; the way to stream, to stop early and to cancel.
    """

    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParameters
    seed: int | None = None
    top_logprobs: int = 0
    constraint: Constraint | None = None
    watch: Watch | None = None


@dataclass(frozen=True)
class Generation:
    """Tokens as served, end token included where it was drawn; log-probs as sampled.

    `finish_reason` is `stop` at an end token, `length` at the limit, `cancelled`, or what the watcher said.
    `tops` holds the likeliest tokens at each position, none where none were asked for; `free` says of each token
    whether the model chose it (see `Token`), empty where that is not known.
    Times are seconds: waiting for a slot, prompt to first token, first token to last.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    wait_s: float
    first_token_s: float
    decode_s: float
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    free: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """Requests that wait for a slot, and requests being answered."""

    waiting: int
    running: int


class _Pending(Future[Generation]):
    """A future that remembers that nobody waits for it, which a running one is told in vain."""

    left = False

    def cancel(self) -> bool:
        self.left = True
        return super().cancel()


@dataclass
class _Row:
    request: GenerationRequest
    future: _Pending
    submitted: float
    rng: random.Random
    started: float = 0.0
    read: int = 0  # tokens of the prompt, where it is read in chunks
    first_token: float = 0.0
    tokens: list[Token] = field(default_factory=list)

    def draw(self, logits_V: np.ndarray) -> str | None:
        """Take the next token; the finish reason if the watcher gave one.

        Raises:
            NothingAllowed: the constraint leaves nothing to draw.
        """
        request = self.request
        constraint = request.constraint
        token = sample(
            logits_V,
            request.sampling,
            self.rng.random(),
            allowed_V=constraint.mask() if constraint is not None else None,
            top=request.top_logprobs,
        )
        self.tokens.append(token)
        if constraint is not None:
            constraint.accept(token.id)
        return request.watch(token) if request.watch is not None else None


@dataclass
class _Queue:
    """The requests of one adapter: waiting, being read in chunks (at most one), and being answered."""

    adapter: LoadedAdapter
    waiting: deque[_Row] = field(default_factory=deque)
    partial: _Row | None = None
    rows: list[_Row] = field(default_factory=list)
    lane: Lane | None = None
    used: float = 0.0

    @property
    def open(self) -> list[_Row]:
        return [*self.rows, *([self.partial] if self.partial else [])]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.partial or self.rows)


class Batcher:
    """Owns the engine's thread; `submit` may be called from any thread.

    Args:
        max_waiting: requests that may wait for a slot, over all adapters; None for no limit.
        chunk_tokens: of prompt that may be read between two decode steps.
    """

    def __init__(self, engine: Engine, *, max_waiting: int | None = None, chunk_tokens: int = _CHUNK_TOKENS) -> None:
        self.engine = engine
        self._chunk_tokens = chunk_tokens
        self._max_waiting = max_waiting
        self._queues: dict[str, _Queue] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="headwater-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, adapter: LoadedAdapter) -> Future[Generation]:
        """Queue a request; cancelling the future takes it out, or ends it with its next token or chunk of prompt.

        Raises:
            ValueError: the request can never be served.
            Overloaded: `max_waiting` requests wait already.
            GenerationFailed: the engine is shutting down.
        """
        self._check(request)
        future = _Pending()
        row = _Row(request, future, time.monotonic(), random.Random(request.seed))
        with self._changed:
            if self._closed:
                raise GenerationFailed("the engine is shutting down")
            if self._max_waiting is not None and self._waiting() >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} requests wait already")
            queue = self._queues.pop(adapter.digest, None) or _Queue(adapter)
            self._queues[adapter.digest] = queue  # last: most recently used
            queue.waiting.append(row)
            self._changed.notify()
        return future

    @property
    def load(self) -> Load:
        with self._changed:
            return Load(self._waiting(), sum(len(queue.open) for queue in self._queues.values()))

    def _waiting(self) -> int:
        return sum(not row.future.cancelled() for queue in self._queues.values() for row in queue.waiting)

    def _check(self, request: GenerationRequest) -> None:
        vocabulary, limit = self.engine.model.dimensions.vocabulary, self.engine.context_tokens
        prompt = len(request.prompt_ids)
        if prompt < 1 or request.max_tokens < 1 or prompt + request.max_tokens > limit:
            raise ValueError(f"a prompt of {prompt} and an answer of {request.max_tokens} tokens do not fit {limit}")
        biased = [token_id for token_id, _ in request.sampling.logit_bias]
        odd = next((i for i in (*request.prompt_ids, *biased) if not 0 <= i < vocabulary), None)
        if odd is not None:
            raise ValueError(f"token id {odd} is not one of the model's {vocabulary}")

    def close(self) -> None:
        """Stop the thread; requests still open fail with GenerationFailed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not any(queue.busy for queue in self._queues.values()):
                    holding = any(queue.lane for queue in self._queues.values())
                    self._changed.wait(_IDLE_S if holding else None)
                    self._release_idle_lanes()
                if self._closed:
                    self._fail_all(GenerationFailed("the engine is shutting down"))
                    return
            self._advance_all()
            with self._changed:
                self._release_idle_lanes()

    def _advance_all(self) -> None:
        """One turn of every version; in a method of its own, so that the thread holds no lane while it rests."""
        with self._changed:
            queues = list(self._queues.values())
        for queue in queues:
            if queue.busy:
                try:
                    self._advance(queue)
                except Exception as error:  # outermost loop of this thread: fail the lane, keep serving
                    self._abandon(queue, error)

    def _advance(self, queue: _Queue) -> None:
        """Read at most one chunk of prompts, then decode one token for every row of one adapter."""
        queue.used = time.monotonic()
        if queue.partial is None:
            self._admit(queue)
        elif queue.lane is not None:
            self._read_chunk(queue, queue.lane, queue.partial)
        if queue.rows and queue.lane is not None:
            logits = queue.lane.decode(np.array([row.tokens[-1].id for row in queue.rows], np.int64))
            self._take_tokens(queue, logits, first=0)

    def _admit(self, queue: _Queue) -> None:
        """Begin what fits: short prompts together, or one long prompt alone."""
        before = len(queue.rows)
        admitted = self._take_waiting(queue)
        if not admitted:
            return
        alone = admitted[0] if len(admitted[0].request.prompt_ids) > self._chunk_tokens else None
        if alone is None:
            queue.rows.extend(admitted)  # before anything can fail, so that no request is left unanswered
        else:
            queue.partial = alone
        if queue.lane is None:
            queue.lane = Lane(self.engine, queue.adapter)
        if alone is not None:
            self._read_chunk(queue, queue.lane, alone)
            return
        logits = queue.lane.prefill([row.request.prompt_ids for row in admitted])
        self._take_tokens(queue, logits, first=before)

    def _take_waiting(self, queue: _Queue) -> list[_Row]:
        """Requests from the front that fit the free slots and, padded to the longest, one chunk; at least one."""
        taken: list[_Row] = []
        longest = 0
        with self._changed:
            while queue.waiting and len(queue.rows) + len(taken) < self.engine.slots:
                row = queue.waiting[0]
                longest = max(longest, len(row.request.prompt_ids))
                if taken and longest * (len(taken) + 1) > self._chunk_tokens:
                    break
                queue.waiting.popleft()
                if row.future.set_running_or_notify_cancel():
                    row.started = time.monotonic()
                    taken.append(row)
        return taken

    def _read_chunk(self, queue: _Queue, lane: Lane, row: _Row) -> None:
        if row.future.left:
            queue.partial = None
            row.future.set_result(_generation(row, "cancelled", time.monotonic()))
            return
        prompt = row.request.prompt_ids
        chunk = prompt[row.read : row.read + self._chunk_tokens]
        logits = lane.prefill_chunk(chunk, start=row.read)
        row.read += len(chunk)
        if row.read == len(prompt):
            lane.join(row.read)
            queue.rows.append(row)
            queue.partial = None
            self._take_tokens(queue, logits, first=len(queue.rows) - 1)

    def _take_tokens(self, queue: _Queue, logits_NV: np.ndarray, *, first: int) -> None:
        """Draw one token for rows `first` onwards and end those that are done."""
        for index in reversed(range(first, len(queue.rows))):
            row = queue.rows[index]
            outcome = self._take_token(row, logits_NV[index - first])
            if outcome is None:
                continue
            self._end(queue, index)
            if isinstance(outcome, Exception):
                row.future.set_exception(outcome)
            else:
                row.future.set_result(_generation(row, outcome, time.monotonic()))

    def _take_token(self, row: _Row, logits_V: np.ndarray) -> str | GenerationFailed | None:
        """Draw one token; the finish reason or failure that ends the row, or None where it goes on."""
        if not np.isfinite(logits_V).all():
            return GenerationFailed("the model's output is not finite")
        try:
            said = row.draw(logits_V)
        except Exception as error:  # a constraint or a watcher, which came with this request and fail it alone
            return GenerationFailed(f"this answer failed: {type(error).__name__}")
        row.first_token = row.first_token or time.monotonic()
        if said is not None or row.future.left:
            return said or "cancelled"
        if row.tokens[-1].id in self.engine.model.end_tokens:
            return "stop"
        return "length" if len(row.tokens) == row.request.max_tokens else None

    def _end(self, queue: _Queue, index: int) -> None:
        assert queue.lane is not None
        queue.lane.drop(index)
        last = queue.rows.pop()
        if index < len(queue.rows):
            queue.rows[index] = last

    def _abandon(self, queue: _Queue, error: Exception) -> None:
        rows = queue.open
        queue.rows, queue.partial, queue.lane = [], None, None
        for row in rows:
            if not row.future.done():
                row.future.set_exception(GenerationFailed(f"the engine failed: {type(error).__name__}"))

    def _release_idle_lanes(self) -> None:
        """Give back the caches of versions nobody uses: beyond the last few at once, all after a while."""
        idle = [digest for digest, queue in self._queues.items() if not queue.busy]
        oldest = idle[: max(0, len(self._queues) - _KEPT_LANES)]
        before = time.monotonic() - _IDLE_S
        for digest in idle:
            if digest in oldest or self._queues[digest].used <= before:
                del self._queues[digest]

    def _fail_all(self, error: Exception) -> None:
        for queue in self._queues.values():
            for row in [*queue.waiting, *queue.open]:
                if not row.future.done():
                    row.future.set_exception(error)


def _generation(row: _Row, finish_reason: str, now: float) -> Generation:
    return Generation(
        token_ids=[token.id for token in row.tokens],
        logprobs=[token.logprob for token in row.tokens],
        finish_reason=finish_reason,
        wait_s=row.started - row.submitted,
        first_token_s=(row.first_token or now) - row.started,
        decode_s=now - (row.first_token or now),
        tops=[token.top for token in row.tokens] if row.request.top_logprobs else [],
        free=[token.free for token in row.tokens],
    )
