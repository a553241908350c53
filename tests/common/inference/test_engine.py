"""The ONNX engine against Hugging Face and PEFT on the same weights."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from common.adapter import Adapter
from common.inference.batching import Batcher, GenerationRequest
from common.inference.engine import Engine, GenerationFailed, Lane
from common.inference.model_folder import ModelFolder
from common.inference.sampling import SamplingParameters
from deploy.drills import crashing
from edge_node.training.lora_model import LoraModel
from tests.conftest import SHAPE, changed

TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def lora(model: ModelFolder) -> LoraModel:
    return LoraModel(model, SHAPE)


@torch.no_grad()
def peft_logits(lora: LoraModel, adapter: Adapter, ids: list[int]) -> np.ndarray:
    """All positions' logits [T, V] by transformers + PEFT."""
    lora.start(adapter, ())
    return lora.peft_model(input_ids=torch.tensor([ids])).logits[0].numpy()


def prompts(count: int, *, seed: int, vocabulary: int = 280) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, vocabulary, rng.integers(3, 40)).tolist() for _ in range(count)]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_logits_equal_pefts_for_base_and_adapters(
    engine: Engine, lora: LoraModel, start: Adapter, seed: int | None
) -> None:
    adapter = start if seed is None else changed(start, seed=seed, scale=0.2)
    batch = prompts(5, seed=3)
    lane = Lane(engine, engine.load(adapter))
    for ids, logits in zip(batch, lane.prefill(batch), strict=True):
        np.testing.assert_allclose(logits, peft_logits(lora, adapter, ids)[-1], atol=TOLERANCE)
    if seed is not None:
        difference = np.abs(peft_logits(lora, adapter, batch[0]) - peft_logits(lora, start, batch[0])).max()
        assert difference > 0.1  # the adapter really changes something


def test_decoding_with_the_cache_equals_one_full_pass(engine: Engine, lora: LoraModel, start: Adapter) -> None:
    adapter = changed(start, seed=1)
    batch = prompts(3, seed=4)
    lane = Lane(engine, engine.load(adapter))
    lane.prefill([ids[:2] for ids in batch])
    for position in range(2, min(map(len, batch))):
        logits = lane.decode(np.array([ids[position] for ids in batch]))
        for row, ids in enumerate(batch):
            np.testing.assert_allclose(logits[row], peft_logits(lora, adapter, ids[: position + 1])[-1], atol=TOLERANCE)


def test_rows_do_not_touch_each_other_when_some_end_and_others_join(engine: Engine, start: Adapter) -> None:
    adapter = engine.load(changed(start, seed=1))
    a, b, c = prompts(3, seed=5)
    lane, alone = Lane(engine, adapter), Lane(engine, adapter)
    lane.prefill([a, b])
    lane.drop(0)  # b moves to row 0
    lane.prefill([c])
    alone.prefill([b])
    np.testing.assert_allclose(lane.decode(np.array([7, 8]))[0], alone.decode(np.array([7]))[0], atol=1e-5)


def test_an_adapter_stays_whole_when_its_source_is_gone(engine: Engine, start: Adapter) -> None:
    """The runtime keeps raw pointers into the arrays it was given."""
    ids = prompts(1, seed=6)
    before = Lane(engine, engine.load(changed(start, seed=1))).prefill(ids).copy()
    loaded = engine.load(changed(start, seed=1))
    gc.collect()
    _ = [np.full((256, 256), np.nan, np.float32) for _ in range(200)]
    np.testing.assert_array_equal(Lane(engine, loaded).prefill(ids), before)


def generate(
    engine: Engine, adapter: Adapter, batch: list[list[int]], **sampling: float
) -> list[tuple[list[int], list[float], str]]:
    batcher = Batcher(engine)
    loaded = engine.load(adapter)
    try:
        futures = [
            batcher.submit(GenerationRequest(ids, 24, SamplingParameters(**sampling), seed=i), loaded)
            for i, ids in enumerate(batch)
        ]
        results = [future.result(timeout=60) for future in futures]
    finally:
        batcher.close()
    return [(r.token_ids, r.logprobs, r.finish_reason) for r in results]


def test_greedy_text_is_hugging_faces(engine: Engine, lora: LoraModel, start: Adapter, model: ModelFolder) -> None:
    adapter = changed(start, seed=2)
    batch = prompts(20, seed=7)  # more than the engine has slots
    lora.start(adapter, ())
    for ids, (tokens, _, reason) in zip(batch, generate(engine, adapter, batch, temperature=0.0), strict=True):
        expected = lora.peft_model.generate(
            input_ids=torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0, len(ids) :].tolist()
        assert tokens == expected
        assert reason == ("stop" if tokens[-1] in model.end_tokens else "length")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_the_trainers(
    engine: Engine, lora: LoraModel, start: Adapter, temperature: float
) -> None:
    adapter = changed(start, seed=1)
    batch = prompts(6, seed=8)
    for ids, (tokens, logprobs, _) in zip(
        batch, generate(engine, adapter, batch, temperature=temperature), strict=True
    ):
        logits = peft_logits(lora, adapter, ids + tokens)[len(ids) - 1 : -1].astype(np.float64) / temperature
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(logprobs, expected[np.arange(len(tokens)), tokens], atol=TOLERANCE)


def test_a_seed_gives_the_same_answer_alone_or_in_a_crowd(engine: Engine, start: Adapter) -> None:
    batch = prompts(12, seed=9)
    crowd = generate(engine, start, batch, temperature=1.0)
    alone = generate(engine, start, batch[:1], temperature=1.0)
    assert crowd[0][0] == alone[0][0]
    assert len({tuple(tokens) for tokens, _, _ in crowd}) > 1


def test_an_answer_that_is_not_finite_fails_alone_and_the_engine_goes_on(engine: Engine, start: Adapter) -> None:
    batcher = Batcher(engine)
    good, bad = engine.load(start), engine.load(crashing(changed(start, seed=1)))
    request = GenerationRequest(prompts(1, seed=1)[0], 8, SamplingParameters())
    try:
        failing = [batcher.submit(request, bad) for _ in range(3)]
        working = [batcher.submit(request, good) for _ in range(3)]
        for future in failing:
            with pytest.raises(GenerationFailed, match="not finite"):
                future.result(timeout=30)
        assert all(future.result(timeout=30).token_ids for future in working)
        assert batcher.submit(request, good).result(timeout=30).token_ids
    finally:
        batcher.close()
    with pytest.raises(GenerationFailed, match="shutting down"):
        batcher.submit(request, good)


def test_a_broken_step_answers_every_request_of_its_lane(
    engine: Engine, start: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(engine)
    request = GenerationRequest(prompts(1, seed=1)[0], 8, SamplingParameters())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "prefill", lambda *_: (_ for _ in ()).throw(MemoryError()))
            failing = [batcher.submit(request, engine.load(start)) for _ in range(3)]
            for future in failing:
                with pytest.raises(GenerationFailed, match="MemoryError"):
                    future.result(timeout=30)
        assert batcher.submit(request, engine.load(start)).result(timeout=30).token_ids
    finally:
        batcher.close()


def test_a_lane_that_cannot_be_built_answers_everyone_and_rests(
    engine: Engine, start: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(engine)
    request = GenerationRequest(prompts(1, seed=1)[0], 8, SamplingParameters())
    loaded = engine.load(start)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "__init__", lambda *_: (_ for _ in ()).throw(MemoryError()))
            futures = [batcher.submit(request, loaded) for _ in range(3 * engine.slots)]
            for future in futures:
                with pytest.raises(GenerationFailed, match="MemoryError"):
                    future.result(timeout=30)
        assert batcher.submit(request, loaded).result(timeout=30).token_ids
    finally:
        batcher.close()


def test_closing_fails_what_is_still_open(engine: Engine, start: Adapter) -> None:
    batcher = Batcher(engine)
    loaded = engine.load(start)
    request = GenerationRequest(prompts(1, seed=1)[0], 40, SamplingParameters())
    futures = [batcher.submit(request, loaded) for _ in range(200)]
    batcher.close()
    for future in futures:
        assert future.done()
