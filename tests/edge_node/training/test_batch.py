"""Padding, passes and shared prompts change where numbers stand, never what they are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training.batch import Batch, PassLimit, Term, collate, completions, rows_of
from edge_node.training.lora_model import LoraModel
from edge_node.training.units import Answer
from tests.conftest import SHAPE, changed

TOKENS = st.integers(1, 279)
LOGPS = st.floats(-9, 0, width=32)
PAD = 0


@st.composite
def answers(draw: st.DrawFn, prompt: tuple[int, ...] | None = None) -> Answer:
    own, completion = (tuple(draw(st.lists(TOKENS, min_size=1, max_size=9))) for _ in range(2))
    count = len(completion)
    return Answer(
        own if prompt is None else prompt + draw(st.sampled_from([(), own])),
        completion,
        tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        behaviour_logps=draw(st.sampled_from([(), tuple(draw(st.lists(LOGPS, min_size=count, max_size=count)))])),
        reward=draw(st.floats(-1, 1, width=32)),
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
    )


@st.composite
def examples_of(draw: st.DrawFn, size: int) -> tuple[Answer, ...]:
    """Answers to one prompt, to prompts that begin the same, or to different ones."""
    prompt = draw(st.one_of(st.none(), st.lists(TOKENS, min_size=1, max_size=9).map(tuple)))
    return tuple(draw(answers(prompt)) for _ in range(size))


@st.composite
def batches(draw: st.DrawFn) -> list[Term]:
    """Terms whose examples have equally many answers; the start's log-probabilities known or not."""
    size = draw(st.integers(1, 3))
    examples = draw(st.lists(examples_of(size), min_size=1, max_size=6))
    known = draw(st.booleans())
    return [
        Term(
            example,
            unit,
            start_logps=tuple(-1.0 - torch.arange(len(a.completion_ids)) for a in example) if known else None,
        )
        for unit, example in enumerate(examples)
    ]


LIMITS = st.builds(PassLimit, rows=st.integers(1, 12), tokens=st.integers(1, 120))


@given(batches(), LIMITS)
def test_passes_keep_all_terms_in_order_within_the_limit(terms: list[Term], limit: PassLimit) -> None:
    parts = list(limit.passes(terms))
    assert [term for part in parts for term in part] == terms

    def fits(part: list[Term]) -> bool:
        rows = sum(len(term.rows) for term in part)
        return rows <= limit.rows and rows * max(term.longest for term in part) <= limit.tokens

    for part in parts:
        assert fits(list(part)) or len(part) == 1  # an example is never split
    for part, following in pairwise(parts):
        assert not fits([*part, following[0]])  # nor is room wasted


def test_no_terms_make_no_pass() -> None:
    assert list(PassLimit(rows=1).passes([])) == []


def test_a_limit_can_be_halved_until_one_row_or_token_is_left() -> None:
    limit, halvings = PassLimit(rows=64, tokens=1 << 30), 0
    while not limit.smallest:
        limit, halvings = limit.halved(), halvings + 1
    assert (limit.rows, halvings) == (1, 6)
    assert PassLimit(1, 1).halved() == PassLimit(1, 1)
    assert PassLimit(rows=9, tokens=1).smallest


def seen_by(batch: Batch, place: int) -> tuple[int, int, list[tuple[int, int]]]:
    """The token before a completion token, its position, and (position, token) of all it attends to."""
    row, column = divmod(int(batch.source_N[place]), batch.ids_RT.shape[1])
    ids = batch.ids_RT[row].tolist()
    if batch.sees_R1TT is None or batch.positions_RT is None:
        return ids[column], column, list(enumerate(ids[: column + 1]))
    positions = batch.positions_RT[row].tolist()
    columns = batch.sees_R1TT[row, 0, column].nonzero()[:, 0].tolist()
    return ids[column], positions[column], sorted((positions[c], ids[c]) for c in columns)


@given(batches())
def test_every_completion_token_follows_what_it_followed_when_it_was_served(terms: list[Term]) -> None:
    """Whoever shares its row: the tokens before it, at their own positions, and nothing else."""
    batch = collate(terms, pad_id=PAD)
    place = 0
    for answer in (answer for term in terms for answer in term.example):
        for index, target in enumerate(answer.completion_ids):
            before = [*answer.prompt_ids, *answer.completion_ids[:index]]
            assert seen_by(batch, place) == (before[-1], len(before) - 1, list(enumerate(before)))
            assert batch.target_N[place] == target
            place += 1
    assert place == len(batch.source_N) == len(batch.target_N) == len(batch.place_N)


@given(batches())
def test_every_answers_values_stand_in_its_row_and_nothing_else_counts(terms: list[Term]) -> None:
    batch = collate(terms, pad_id=PAD)
    everything = [(answer, term, index) for term in terms for index, answer in enumerate(term.example)]
    assert batch.examples == len(terms)
    assert batch.answers_per_example == len(terms[0].example)
    kept = max(len(answer.completion_ids) for answer, _, _ in everything)
    assert [divmod(place, kept) for place in batch.place_N.tolist()] == [
        (row, k) for row, (answer, _, _) in enumerate(everything) for k in range(len(answer.completion_ids))
    ]
    for row, (answer, term, index) in enumerate(everything):
        count = len(answer.completion_ids)
        start = None if term.start_logps is None else term.start_logps[index].tolist()
        for found, expected in (
            (batch.written_BK, [float(written) for written in answer.written]),
            (batch.behaviour_logps_BK, list(answer.behaviour_logps) or None),
            (batch.start_logps_BK, start),
        ):
            assert found.shape == (len(everything), kept)
            assert found[row].tolist() == (expected or [0.0] * count) + [0.0] * (kept - count)
        assert batch.rewards_B[row] == answer.reward
        assert batch.temperature_B[row] == answer.temperature


def answer_of(prompt: int, completion: int, *, first: int = 7) -> Answer:
    return Answer((first,) * prompt, (5,) * completion, (True,) * completion)


def test_a_prompt_is_computed_once_where_that_costs_less() -> None:
    long_prompt = (answer_of(40, 4), answer_of(40, 6))
    assert [(row.shared, row.length) for row in rows_of(long_prompt)] == [(40, 50)]
    longer_prompt = (answer_of(40, 4), answer_of(44, 6))  # the rest of its prompt is its own
    assert [(row.shared, row.length) for row in rows_of(longer_prompt)] == [(40, 54)]
    another = (answer_of(40, 4), answer_of(40, 6, first=8))
    assert [(row.shared, row.length) for row in rows_of(another)] == [(0, 44), (0, 46)]
    long_answers = (answer_of(40, 2000), answer_of(40, 2000))  # a row this long costs more attention than it saves
    assert [row.shared for row in rows_of(long_answers)] == [0, 0]
    assert [row.shared for row in rows_of((answer_of(40, 4),))] == [0]


@given(batches())
def test_completions_are_the_inverse_of_collating(terms: list[Term]) -> None:
    batch = collate(terms, pad_id=PAD)
    for term, found in zip(terms, completions(batch.written_BK, terms), strict=True):
        assert [values.tolist() for values in found] == [[float(w) for w in answer.written] for answer in term.example]
        assert all(
            values.untyped_storage().size() == values.nbytes for values in found
        )  # no view keeps the batch alive


@pytest.mark.parametrize("shared", [0, 20])
def test_an_answers_log_probabilities_are_those_it_has_alone_and_unpadded(
    model: ModelFolder, start: Adapter, shared: int
) -> None:
    """Against transformers on the bare sequence: columns, temperature, padding and shared prompts must all be right."""
    lora = LoraModel(model, SHAPE)
    lora.start(changed(start, seed=1), ())
    generator = torch.Generator().manual_seed(0)

    def answer(prompt: int, completion: int, temperature: float) -> Answer:
        ids = torch.randint(6, 280, (prompt + completion,), generator=generator).tolist()
        before = tuple(range(6, 6 + shared))
        return Answer(before + tuple(ids[:prompt]), tuple(ids[prompt:]), (True,) * completion, temperature=temperature)

    terms = [
        Term((answer(3, 9, 1.0), answer(12, 2, 0.5)), 0),
        Term((answer(7, 1, 2.0), answer(1, 20, 1.0)), 1),
    ]
    batch = collate(terms, pad_id=PAD)
    assert len(batch.ids_RT) == (2 if shared else 4)
    with torch.no_grad():
        found = completions(lora.token_logps(batch).logps_BK, terms)
        for term, own in zip(terms, found, strict=True):
            for one, logps_K in zip(term.example, own, strict=True):
                ids = torch.tensor([one.prompt_ids + one.completion_ids])
                logits_TV = lora.peft_model(input_ids=ids).logits[0] / one.temperature
                expected = logits_TV[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                torch.testing.assert_close(logps_K, expected[-len(one.completion_ids) :], atol=2e-4, rtol=1e-4)
