"""The batcher: what a watcher, a constraint, a limit and a cancellation do to one request, and not to others."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import psutil
import pytest

from common.adapter import Adapter
from common.inference import batching
from common.inference.batching import Batcher, Generation, GenerationRequest, Load, Overloaded, Token
from common.inference.engine import Engine, GenerationFailed, Lane, LoadedAdapter
from common.inference.model_folder import ModelFolder
from common.inference.sampling import SamplingParameters
from tests.conftest import changed

PROMPT = [2, 20, 30, 40]
REQUEST = GenerationRequest(PROMPT, 24, SamplingParameters(), seed=5)


@pytest.fixture
def batcher(engine: Engine) -> Iterator[Batcher]:
    batcher = Batcher(engine, max_waiting=3)
    yield batcher
    batcher.close()


@pytest.fixture(scope="module")
def adapter(engine: Engine, start: Adapter) -> LoadedAdapter:
    return engine.load(changed(start, seed=1))


def answer(batcher: Batcher, adapter: LoadedAdapter, **changes: object) -> Generation:
    return batcher.submit(replace(REQUEST, **changes), adapter).result(timeout=30)


class Held:
    """A watcher that keeps the engine's thread until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, token: Token) -> str | None:
        self.reached.set()
        assert self.go.wait(30)
        return None


def test_a_watcher_sees_every_token_as_it_is_recorded(batcher: Batcher, adapter: LoadedAdapter) -> None:
    seen: list[Token] = []
    got = answer(batcher, adapter, watch=lambda token: seen.append(token), top_logprobs=3)
    assert [t.id for t in seen] == got.token_ids
    assert [t.logprob for t in seen] == got.logprobs
    assert [t.top for t in seen] == got.tops
    assert all(len(top) == 3 for top in got.tops)
    assert answer(batcher, adapter).token_ids == got.token_ids  # watching changes nothing
    assert answer(batcher, adapter).tops == []


def test_a_watcher_ends_an_answer_where_it_says(batcher: Batcher, adapter: LoadedAdapter) -> None:
    whole = answer(batcher, adapter)
    count = iter(range(100))
    got = answer(batcher, adapter, watch=lambda _: "cancelled" if next(count) == 2 else None)
    assert got.token_ids == whole.token_ids[:3]
    assert got.finish_reason == "cancelled"


@pytest.mark.parametrize("ended", ["first", "later"])
def test_a_request_that_raises_fails_alone(batcher: Batcher, adapter: LoadedAdapter, ended: str) -> None:
    count = iter(range(0 if ended == "first" else 3))
    failing = batcher.submit(replace(REQUEST, watch=lambda _: (next(count), None)[1]), adapter)
    others = [batcher.submit(REQUEST, adapter) for _ in range(2)]
    with pytest.raises(GenerationFailed, match="StopIteration"):
        failing.result(timeout=30)
    alone = answer(batcher, adapter)
    assert [future.result(timeout=30).token_ids for future in others] == [alone.token_ids] * 2


def test_as_many_wait_as_may_and_cancelling_makes_room(
    batcher: Batcher, engine: Engine, adapter: LoadedAdapter
) -> None:
    held = Held()
    first = batcher.submit(replace(REQUEST, watch=held), adapter)
    assert held.reached.wait(30)
    waiting = [batcher.submit(REQUEST, adapter) for _ in range(3)]
    assert batcher.load == Load(waiting=3, running=1)
    with pytest.raises(Overloaded, match="3 requests wait"):
        batcher.submit(REQUEST, adapter)
    assert waiting[1].cancel()
    assert batcher.load.waiting == 2
    last = batcher.submit(REQUEST, adapter)
    held.go.set()
    answers = [future.result(timeout=30) for future in (first, waiting[0], waiting[2], last)]
    assert len({tuple(a.token_ids) for a in answers}) == 1
    assert waiting[1].cancelled()
    assert batcher.load == Load(0, 0)


@dataclass
class Only:
    """Permits one token, then another, and so on."""

    tokens: list[int]
    position: int = 0

    def mask(self) -> np.ndarray:
        mask = np.zeros(280, bool)
        mask[self.tokens[self.position]] = True
        return mask

    def accept(self, token_id: int) -> None:
        assert token_id == self.tokens[self.position]
        self.position += 1


def test_a_constraint_decides_and_what_it_forces_is_certain(batcher: Batcher, adapter: LoadedAdapter) -> None:
    got = answer(batcher, adapter, constraint=Only([50, 51, 1]))
    assert got.token_ids == [50, 51, 1]
    assert got.logprobs == [0.0, 0.0, 0.0]
    assert got.finish_reason == "stop"


def test_a_constraint_that_breaks_fails_alone(batcher: Batcher, adapter: LoadedAdapter) -> None:
    failing = batcher.submit(replace(REQUEST, constraint=Only([50])), adapter)
    working = batcher.submit(REQUEST, adapter)
    with pytest.raises(GenerationFailed, match="IndexError"):
        failing.result(timeout=30)
    assert working.result(timeout=30).token_ids


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": []},
        {"prompt_ids": [5] * 90},
        {"prompt_ids": [280]},
        {"prompt_ids": [-1]},
        {"max_tokens": 0},
        {"max_tokens": 93},
        {"sampling": SamplingParameters(logit_bias=((280, 1.0),))},
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    batcher: Batcher, adapter: LoadedAdapter, changes: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=r"fit|token id"):
        batcher.submit(replace(REQUEST, **changes), adapter)
    assert batcher.load == Load(0, 0)


def test_a_bias_forces_and_forbids(batcher: Batcher, adapter: LoadedAdapter) -> None:
    forced = answer(batcher, adapter, sampling=SamplingParameters(logit_bias=((77, 100.0),)))
    assert set(forced.token_ids) == {77}
    first = answer(batcher, adapter).token_ids[0]
    assert first not in answer(batcher, adapter, sampling=SamplingParameters(logit_bias=((first, -100.0),))).token_ids


def test_requests_without_a_seed_differ(batcher: Batcher, adapter: LoadedAdapter) -> None:
    answers = [answer(batcher, adapter, seed=None, sampling=SamplingParameters(2.0)).token_ids for _ in range(3)]
    assert len({tuple(a) for a in answers}) > 1


def tokens_by_chunk(engine: Engine, adapter: LoadedAdapter, chunk_tokens: int) -> list[Generation]:
    """Many requests of all prompt lengths on few slots, so that some end and join while others are read."""
    rng = np.random.default_rng(3)
    batcher = Batcher(engine, chunk_tokens=chunk_tokens)
    try:
        futures = [
            batcher.submit(
                GenerationRequest(
                    rng.integers(6, 280, rng.integers(1, 60)).tolist(),
                    int(rng.integers(1, 30)),
                    SamplingParameters(),
                    seed=i,
                ),
                adapter,
            )
            for i in range(30)
        ]
        return [future.result(timeout=60) for future in futures]
    finally:
        batcher.close()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 32])
def test_answers_do_not_depend_on_how_prompts_are_read(
    engine: Engine, adapter: LoadedAdapter, chunk_tokens: int
) -> None:
    whole = tokens_by_chunk(engine, adapter, 10_000)
    chunked = tokens_by_chunk(engine, adapter, chunk_tokens)
    for a, b in zip(whole, chunked, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_a_long_prompt_delays_others_by_one_chunk_at_a_time(
    engine: Engine, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    read = Lane.prefill_chunk

    def recorded(lane: Lane, chunk: list[int], *, start: int) -> np.ndarray:
        events.append(f"chunk of {len(chunk)}")
        return read(lane, chunk, start=start)

    monkeypatch.setattr(Lane, "prefill_chunk", recorded)
    held = Held()

    def watch(token: Token) -> None:
        events.append("token")
        held(token)

    batcher = Batcher(engine, chunk_tokens=16)
    try:
        running = batcher.submit(
            replace(REQUEST, max_tokens=40, watch=watch, sampling=SamplingParameters(logit_bias=((1, -100.0),))),
            adapter,
        )
        assert held.reached.wait(30)
        long = batcher.submit(replace(REQUEST, prompt_ids=[9] * 70, max_tokens=2), adapter)
        held.go.set()
        assert long.result(timeout=30).token_ids
        assert running.result(timeout=30).token_ids
    finally:
        batcher.close()
    first = events.index("chunk of 16")
    assert events[first : first + 9] == ["chunk of 16", "token"] * 4 + ["chunk of 6"]


@pytest.mark.parametrize("prompt", [4, 60])
def test_cancelling_ends_what_runs_with_its_next_token_or_chunk(
    engine: Engine, adapter: LoadedAdapter, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []
    reached, go = threading.Event(), threading.Event()
    read = Lane.prefill_chunk

    def slowly(lane: Lane, chunk: list[int], *, start: int) -> np.ndarray:
        chunks.append(start)
        reached.set()
        assert go.wait(30)
        return read(lane, chunk, start=start)

    monkeypatch.setattr(Lane, "prefill_chunk", slowly)
    held = Held()
    batcher = Batcher(engine, chunk_tokens=8)
    try:
        running = batcher.submit(replace(REQUEST, prompt_ids=[9] * prompt, watch=held), adapter)
        assert (held.reached if prompt == 4 else reached).wait(30)
        assert not running.cancel()
        held.go.set()
        go.set()
        got = running.result(timeout=30)
    finally:
        batcher.close()
    assert got.finish_reason == "cancelled"
    assert len(got.token_ids) == (1 if prompt == 4 else 0)
    assert len(chunks) == (0 if prompt == 4 else 1)


def test_a_chunk_that_fails_answers_its_lane_and_the_next_request_works(
    engine: Engine, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(engine, chunk_tokens=4)
    long = replace(REQUEST, prompt_ids=[9] * 30)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "join", lambda *_: (_ for _ in ()).throw(MemoryError()))
            for future in [batcher.submit(long, adapter) for _ in range(2)]:
                with pytest.raises(GenerationFailed, match="MemoryError"):
                    future.result(timeout=30)
        assert batcher.submit(long, adapter).result(timeout=30).token_ids
        assert batcher.load == Load(0, 0)
    finally:
        batcher.close()


def test_closing_answers_a_prompt_that_is_half_read(engine: Engine, adapter: LoadedAdapter) -> None:
    batcher = Batcher(engine, chunk_tokens=1)
    futures = [batcher.submit(replace(REQUEST, prompt_ids=[9] * 70), adapter) for _ in range(5)]
    batcher.close()
    for future in futures:
        with pytest.raises(GenerationFailed, match="shutting down"):
            future.result(timeout=0)


def test_an_idle_lane_gives_its_cache_back(
    engine: Engine, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Lane]] = []
    build = Lane.__init__

    def recorded(lane: Lane, *arguments: object) -> None:
        made.append(weakref.ref(lane))
        build(lane, *arguments)

    monkeypatch.setattr(Lane, "__init__", recorded)
    monkeypatch.setattr(batching, "_IDLE_S", 0.2)
    batcher = Batcher(engine)
    try:
        first = answer(batcher, adapter)
        assert made[0]() is not None
        deadline = time.monotonic() + 20
        while made[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert made[0]() is None
        assert answer(batcher, adapter).token_ids == first.token_ids
        assert len(made) == 2
    finally:
        batcher.close()


def test_no_more_than_a_few_versions_keep_a_lane(engine: Engine, start: Adapter) -> None:
    batcher = Batcher(engine)
    try:
        for seed in range(6):
            answer(batcher, engine.load(changed(start, seed=seed)))
        answer(batcher, engine.load(changed(start, seed=5)))
        assert len(batcher._queues) <= 4  # three, and one that may have just ended
    finally:
        batcher.close()


def test_a_lane_costs_nothing_before_it_is_written(model: ModelFolder, start: Adapter) -> None:
    engine = Engine(model, slots=64, context_tokens=512, threads=1)
    process = psutil.Process()
    before = process.memory_info().rss
    lane = Lane(engine, engine.load(start))
    assert (
        sum(array.nbytes for array in lane.cache.arrays.values()) == engine.lane_bytes == 64 * 512 * 4 * 2 * 2 * 32 * 4
    )
    lane.prefill([[5] * 20])
    assert process.memory_info().rss - before < engine.lane_bytes / 4
