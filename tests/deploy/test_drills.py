"""The bad versions are bad in the way their names say, also beside an adapter that has learned nothing."""

from __future__ import annotations

from itertools import islice

import numpy as np

from common.adapter import Adapter
from common.chat import Message
from common.inference.batching import Batcher, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine
from common.inference.model_folder import ModelFolder
from common.inference.sampling import SamplingParameters
from common.tasks import math as task
from deploy.drills import crashing, fluent_but_worse


def scores(engine: Engine, tokenizer: ChatTokenizer, adapter: Adapter) -> list[task.Score]:
    problems = list(islice(task.problems(task.Distribution(), task.Split.GOLDEN, seed=1), 100))
    batcher, loaded = Batcher(engine), engine.load(adapter)
    requests = [
        GenerationRequest(tokenizer.encode([Message("user", p.prompt)]), 48, SamplingParameters(), seed=i)
        for i, p in enumerate(problems)
    ]
    futures = [batcher.submit(request, loaded) for request in requests]
    texts = [tokenizer.decode(future.result(timeout=60).token_ids) for future in futures]
    batcher.close()
    return [task.score_answer(p, text) for p, text in zip(problems, texts, strict=True)]


def test_the_worse_version_is_fluent_and_much_worse(
    engine: Engine, tokenizer: ChatTokenizer, start: Adapter, model: ModelFolder
) -> None:
    before = scores(engine, tokenizer, start)
    after = scores(engine, tokenizer, fluent_but_worse(start, model))
    assert np.mean([s.format for s in after]) > 0.8
    assert np.mean([s.total for s in after]) < np.mean([s.total for s in before]) - 0.15


def test_the_crashing_version_is_made_of_finite_weights(start: Adapter) -> None:
    assert all(np.isfinite(tensor).all() for tensor in crashing(start).tensors.values())
