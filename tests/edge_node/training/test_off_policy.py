"""Which answers an importance weight may be given to: a rule on each record alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from common.adapter import Adapter
from common.inference.batching import Batcher, GenerationRequest
from common.inference.engine import Engine
from common.inference.model_folder import ModelFolder
from common.inference.sampling import SamplingParameters
from edge_node.training.batch import Term, collate, completions
from edge_node.training.lora_model import LoraModel
from edge_node.training.off_policy import is_trusted, with_behaviour_logps
from edge_node.training.units import Answer, Unit
from tests.conftest import SHAPE, changed

HERE, ELSEWHERE = "d" * 64, "e" * 64
NATS = st.lists(st.floats(-6, 6, width=32), min_size=1, max_size=20)


def term(
    differences: list[float], *, digest: str = HERE, written: list[bool] | None = None, recorded: float = -2.0
) -> Term:
    """An answer whose log-probability under the start differs from what was recorded by so much, token by token."""
    count = len(differences)
    answer = Answer(
        (1,), (2,) * count, tuple(written or [True] * count), (recorded,) * count, reward=1.0, adapter_digest=digest
    )
    return Term((answer,), start_logps=(torch.tensor(differences, dtype=torch.float64) + recorded,))


def trusted(*arguments: object, **named: object) -> bool:
    return is_trusted(term(*arguments, **named), start_digest=HERE)  # type: ignore[arg-type]


@given(NATS)
def test_serving_and_training_the_same_weights_must_agree_to_a_fifth_of_a_nat(differences: list[float]) -> None:
    mean = sum(map(abs, differences)) / len(differences)
    assume(abs(mean - 0.2) > 1e-5)
    assert trusted(differences) is (mean < 0.2)


@given(NATS)
def test_an_older_versions_answer_needs_three_tenths_of_its_tokens(differences: list[float]) -> None:
    weights = [math.exp(d) for d in differences]
    effective = sum(weights) ** 2 / sum(w * w for w in weights)  # Kish
    assume(abs(effective / len(weights) - 0.3) > 1e-4)
    assert trusted(differences, digest=ELSEWHERE) is (effective / len(weights) > 0.3)


@given(NATS, st.floats(-40, 40, width=32))
def test_what_all_tokens_have_in_common_does_not_change_the_effective_size(
    differences: list[float], shift: float
) -> None:
    weights = [math.exp(d) for d in differences]
    share = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assume(abs(share - 0.3) > 1e-3)
    assert trusted([d + shift for d in differences], digest=ELSEWHERE) is trusted(differences, digest=ELSEWHERE)


@pytest.mark.parametrize("digest", [HERE, ELSEWHERE])
def test_only_what_the_model_wrote_counts(digest: str) -> None:
    tool_result = [50.0, math.nan, -50.0]
    mask = [True, False, False, False, True, True, True]
    assert trusted([0.1, *tool_result, 0.1, 0.1, 0.1], written=mask, digest=digest)
    assert not trusted([9.0, *tool_result, 0.0, -9.0, 0.0], written=mask, digest=digest)  # one token of four
    assert not trusted([0.0, 0.0], written=[False, False], digest=digest)


@pytest.mark.parametrize("digest", [HERE, ELSEWHERE])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_not_trusted(digest: str, wrong: float) -> None:
    assert not trusted([0.0] * 9 + [wrong], digest=digest)


def test_one_answer_nobody_believes_takes_its_example_with_it_and_no_other() -> None:
    good, bad = term([0.0, 0.0]), term([5.0, 5.0])
    assert good.start_logps is not None
    assert bad.start_logps is not None
    both = Term(good.example + bad.example, start_logps=good.start_logps + bad.start_logps)
    assert [is_trusted(t, start_digest=HERE) for t in (good, bad, both)] == [True, False, False]
    for unit, weight in ((7, 0.25), (0, 1.0)):
        assert is_trusted(replace(good, unit=unit, weight=weight), start_digest=HERE)


def test_units_whose_answers_were_all_recorded_remain_in_order() -> None:
    with_logps = Answer((1,), (2,), (True,), (-1.0,))
    without = Answer((1,), (2,), (True,))
    whole = Unit(((with_logps,), (with_logps, with_logps)))
    another = Unit(((replace(with_logps, reward=1.0),),))
    partly = Unit(((with_logps,), (with_logps, without)))
    assert with_behaviour_logps((whole, partly, another, Unit(((without,),)))) == (whole, another)
    assert with_behaviour_logps(()) == ()


def test_answers_the_engine_served_are_trusted_under_their_own_version_only(
    engine: Engine, model: ModelFolder, start: Adapter
) -> None:
    """Recorded by ONNX under the sampling distribution, recomputed by PyTorch."""
    adapter, other = changed(start, seed=1), changed(start, seed=2, scale=1.0)
    prompt, served = [7, 20, 31, 9], engine.load(adapter)
    batcher = Batcher(engine)
    try:
        sampling = SamplingParameters(temperature=0.7)
        futures = [
            batcher.submit(GenerationRequest(prompt, max_tokens=24, sampling=sampling, seed=seed), served)
            for seed in range(3)
        ]
        generations = [future.result() for future in futures]
    finally:
        batcher.close()
    terms = [
        Term(
            (
                Answer(
                    tuple(prompt),
                    tuple(g.token_ids),
                    (True,) * len(g.token_ids),
                    tuple(g.logprobs),
                    temperature=0.7,
                    adapter_digest=adapter.digest,
                ),
            ),
            unit,
        )
        for unit, g in enumerate(generations)
    ]
    lora = LoraModel(model, SHAPE)

    def under(weights: Adapter) -> list[Term]:
        lora.start(weights, ())
        batch = collate(terms, pad_id=0)
        with torch.no_grad():
            found = completions(lora.token_logps(batch).logps_BK, terms)
        return [replace(t, start_logps=logps) for t, logps in zip(terms, found, strict=True)]

    assert all(is_trusted(t, start_digest=adapter.digest) for t in under(adapter))
    assert not any(is_trusted(t, start_digest=adapter.digest) for t in under(other))
