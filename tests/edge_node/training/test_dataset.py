from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.training.dataset import (
    LONGEST_EDIT_CHARACTERS,
    LONGEST_LAG,
    Dataset,
    DatasetSettings,
    build_dataset,
    edit_distance,
    imbalance,
    version_number,
)
from edge_node.training.noise import SecureRandom
from edge_node.training.units import Answer, ExampleKind, Unit

VOCABULARY = 300
PAIRS = DatasetSettings(kind="pairs", unit="trajectory", examples_per_user=4, group_size=2, current_version=3)
ANSWERS, THUMBS, GROUPS = (replace(PAIRS, kind=kind) for kind in ("answers", "thumbs", "groups"))
SERVED = "The answer to this is forty-two."
EDITED = "The answer to that is forty-three!"
KINDS: list[ExampleKind] = ["pairs", "answers", "thumbs", "groups"]


def encode_answer(text: str) -> tuple[int, ...]:
    if "<end>" in text:
        raise ValueError("message text contains the model's control token <end>")
    return (*(min(ord(character), 250) for character in text), 299)


def built(trajectories: Sequence[Trajectory], settings: DatasetSettings, **limits: int) -> Dataset:
    return build_dataset(
        trajectories, settings, encode_answer=encode_answer, random=SecureRandom(), vocabulary=VOCABULARY, **limits
    )


def trajectory(
    name: str, *, request: str | None = None, position: int = 0, completion: Sequence[int] = ()
) -> Trajectory:
    """A usable answer; alone where no request is given."""
    ids = list(completion) or [*(min(ord(c), 250) for c in name), 299]
    made = Trajectory(
        id=name,
        request_id=request or name,
        choice_index=position,
        user_pseudonym=b"u" * 32,
        model_version="v3",
        adapter_digest="d" * 64,
        prompt_token_ids=[1, 2],
        completion_token_ids=ids,
        logprobs=[-0.5] * len(ids),
        assistant_mask=[True] * len(ids),
    )
    made.messages.add(role="user", content="What is it?")
    made.messages.add(role="assistant", content=SERVED)
    made.sampling.temperature = 0.7
    return made


def rated(name: str, rating: float, **where: object) -> Trajectory:
    made = trajectory(name, **where)  # type: ignore[arg-type]
    made.feedback.add(rating=rating)
    return made


def rewarded(name: str, *values: float, **where: object) -> Trajectory:
    made = trajectory(name, **where)  # type: ignore[arg-type]
    for value in values:
        made.rewards.add(source="math.answer", value=value)
    return made


def whole(kind: ExampleKind) -> list[Trajectory]:
    """A request with two answers, the second one better, usable for every kind."""
    answers = [rewarded(f"r-{i}", float(i), request="r", position=i) for i in range(2)]
    for i, answer in enumerate(answers):
        answer.feedback.add(rating=2.0 * i - 1.0)
    return answers


# --- what becomes of a record


def test_a_pair_carries_what_was_served() -> None:
    worse, better = whole("pairs")
    better.assistant_mask[0] = False
    [unit] = built([worse, better], PAIRS).units
    chosen, rejected = unit.examples[0]
    assert chosen == Answer(
        prompt_ids=(1, 2),
        completion_ids=tuple(better.completion_token_ids),
        written=(False, True, True, True),
        behaviour_logps=(-0.5,) * 4,
        adapter_digest="d" * 64,
    )
    assert rejected.completion_ids == tuple(worse.completion_token_ids)


def test_answers_carry_their_clipped_reward_and_their_temperature() -> None:
    rewards = [(0.25, 0.5), (-7.0,), (1e308, 1e308)]
    dataset = built([rewarded(f"a{i}", *values) for i, values in enumerate(rewards)], ANSWERS)
    answers = [unit.examples[0][0] for unit in dataset.units]
    assert [answer.reward for answer in answers] == [0.75, -2.0, 5.0]
    assert {answer.temperature for answer in answers} == {0.7}


def test_thumbs_are_the_sign_of_the_last_rating() -> None:
    changed_mind, silent = rated("a", 1.0), rated("b", 5.0)
    changed_mind.feedback.add(rating=-0.5)
    silent.feedback.add(text="just saying")
    taken_back = rated("c", 1.0)
    taken_back.feedback.add(rating=0.0)
    dataset = built([changed_mind, silent, taken_back, trajectory("d")], THUMBS)
    assert [unit.examples[0][0].reward for unit in dataset.units] == [-1.0, 1.0]
    assert {unit.examples[0][0].temperature for unit in dataset.units} == {1.0}
    assert dataset.left_out == {"not rated": 2}


def test_groups_are_the_first_answers_in_order() -> None:
    answers = [rewarded(f"r-{i}", float(i), request="r", position=i) for i in range(3)]
    [unit] = built(answers[::-1], GROUPS).units
    assert [answer.reward for answer in unit.examples[0]] == [0.0, 1.0]


def _set(**fields: object) -> Callable[[Trajectory], None]:
    def alter(t: Trajectory) -> None:
        for name, value in fields.items():
            setattr(t, name, value)

    return alter


def _replace(field: str, values: Sequence[object]) -> Callable[[Trajectory], None]:
    def alter(t: Trajectory) -> None:
        t.ClearField(field)  # type: ignore[arg-type]
        getattr(t, field).extend(values)

    return alter


ALTERED: list[tuple[Callable[[Trajectory], object], str]] = [
    (_set(error="GenerationFailed"), "failed"),
    (_replace("completion_token_ids", []), "redacted or without token ids"),
    (_replace("prompt_token_ids", []), "redacted or without token ids"),
    (_set(base_digest="e" * 64), "of another base model"),
    (_replace("prompt_token_ids", [1, VOCABULARY]), "token ids of another tokenizer"),
    (_replace("prompt_token_ids", [1] * 2045), "too long"),
    (_replace("assistant_mask", [True]), "assistant mask does not match the completion"),
    (_replace("assistant_mask", []), "assistant mask does not match the completion"),
    (_replace("assistant_mask", [False] * 4), "nothing in it was written by the model"),
    (_replace("logprobs", [-1.0]), "log-probabilities do not match the completion"),
    (_replace("logprobs", [-1.0, math.nan, -1.0, -1.0]), "log-probabilities out of range"),
    (_replace("logprobs", [-1.0, -math.inf, -1.0, -1.0]), "log-probabilities out of range"),
    (_replace("logprobs", [-1.0, 3.0, -1.0, -1.0]), "log-probabilities out of range"),
    (lambda t: t.rewards.add(value=math.nan), "reward is not a number"),
    (lambda t: t.rewards.add(value=-math.inf), "reward is not a number"),
    (lambda t: t.feedback.add(rating=math.nan), "rating is not a number"),
    (_set(model_version="v" + "9" * 40), "version is not readable"),
    (_set(model_version="latest"), "version is not readable"),
    (_set(model_version=""), "version is not readable"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("alter", "reason"), ALTERED)
def test_an_unusable_record_is_left_out(alter: Callable[[Trajectory], object], reason: str, kind: ExampleKind) -> None:
    records, settings = whole(kind), replace(PAIRS, kind=kind)
    usable = built(records, settings)
    assert len(usable.units) == (2 if kind in ("answers", "thumbs") else 1) and not usable.left_out
    alter(records[0])
    dataset = built(records, settings)
    assert dataset.left_out[reason] == 1
    assert len(dataset.units) == len(usable.units) - 1


@pytest.mark.parametrize(("field", "value"), [("top_k", 1), ("top_p", 1e-6), ("temperature", 0.0)])
@pytest.mark.parametrize("kind", ["answers", "groups"])
def test_answers_that_were_as_good_as_fixed_are_greedy(kind: str, field: str, value: float) -> None:
    records = whole(kind)
    assert not built(records, replace(PAIRS, kind=kind)).left_out
    setattr(records[0].sampling, field, value)
    assert built(records, replace(PAIRS, kind=kind)).left_out["drawn greedily"] == 1


def test_only_sampled_and_rewarded_answers_make_answers_and_groups() -> None:
    for kind in ("answers", "groups"):
        greedy, unrewarded = whole(kind), whole(kind)
        greedy[0].sampling.temperature = 0.0
        unrewarded[0].ClearField("rewards")
        assert built(greedy, replace(PAIRS, kind=kind)).left_out["drawn greedily"] == 1
        assert built(unrewarded, replace(PAIRS, kind=kind)).left_out["no reward"] == 1
    greedy = whole("pairs")
    greedy[0].sampling.temperature = 0.0
    assert len(built(greedy, PAIRS).units) == 1


def test_missing_log_probabilities_stay_empty() -> None:
    record = rewarded("a", 1.0)
    record.ClearField("logprobs")
    [unit] = built([record], ANSWERS).units
    assert unit.examples[0][0].behaviour_logps == ()


def test_limits_of_the_model_are_limits_of_its_records() -> None:
    records = [rewarded("aaaa", 1.0)]
    assert len(built(records, ANSWERS, longest_tokens=7).units) == 1
    assert built(records, ANSWERS, longest_tokens=6).left_out == {"too long": 1}


@pytest.mark.parametrize(
    ("version", "number"),
    [("v0", 0), ("v12", 12), ("base", 0), ("v-1", None), ("12", None), ("v1 ", None), ("v١", None), ("v1\n", None)],
)
def test_version_numbers(version: str, number: int | None) -> None:
    assert version_number(version) == number


def test_records_get_too_old() -> None:
    settings = replace(ANSWERS, current_version=LONGEST_LAG + 1)
    records = [rewarded(f"a{i}", 1.0) for i in range(4)]
    for record, version in zip(records, ("base", "v0", "v1", f"v{LONGEST_LAG + 30}"), strict=True):
        record.model_version = version
    dataset = built(records, settings)
    assert (len(dataset.units), dataset.left_out) == (2, {"too old a version": 2})


def test_every_record_is_in_a_unit_or_counted() -> None:
    records = [*whole("pairs"), edited("e"), trajectory("lonely"), rewarded("copy", 1.0), rewarded("copy", 1.0)]
    assert built(records, PAIRS).left_out == {"nothing to compare with": 2, "twice under one id": 1}


# --- edits


def edited(name: str, text: str = EDITED) -> Trajectory:
    made = trajectory(name)
    made.feedback.add(edited_text="superseded")
    made.feedback.add(edited_text=text)
    made.feedback.add(rating=-1.0)
    return made


def test_an_edit_is_preferred_to_what_was_served() -> None:
    [unit] = built([edited("a"), rated("up", 1.0)], PAIRS).units
    correction, served = unit.examples[0]
    assert correction.completion_ids == encode_answer(EDITED)
    assert (correction.prompt_ids, correction.written) == ((1, 2), (True,) * len(correction.completion_ids))
    assert (correction.behaviour_logps, correction.temperature) == ((), 1.0)
    assert served.completion_ids == tuple(edited("a").completion_token_ids)


@pytest.mark.parametrize(
    "text",
    [
        SERVED.replace("forty", "fortY"),  # a slip
        "Something else entirely, said in quite other words than before.",
        SERVED.replace("forty-two", "[redacted:number]"),
        SERVED.replace("forty-two", "<end>"),
        SERVED.replace("forty-two", "x" * (LONGEST_EDIT_CHARACTERS + 1)),
    ],
)
def test_an_edit_that_is_no_correction_leaves_the_record_as_it_is(text: str) -> None:
    [unit] = built([edited("down", text), rated("up", 1.0)], PAIRS).units
    assert unit.examples[0][1].completion_ids == tuple(trajectory("down").completion_token_ids)
    assert unit.examples[0][0].completion_ids == tuple(trajectory("up").completion_token_ids)


def test_an_edit_that_does_not_fit_or_changes_no_token_is_not_used() -> None:
    assert built([edited("a")], PAIRS, longest_tokens=2 + len(EDITED)).units == ()
    same = edited("a")
    same.ClearField("completion_token_ids")
    same.completion_token_ids.extend(encode_answer(EDITED))
    same.ClearField("logprobs")
    same.ClearField("assistant_mask")
    same.assistant_mask.extend([True] * len(same.completion_token_ids))
    assert built([same], PAIRS).units == ()


def _levenshtein(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        above, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    return row[-1]


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_edit_distance_is_levenshteins(first: str, second: str) -> None:
    longest = max(len(first), len(second), 1)
    assert edit_distance(first, second) == pytest.approx(_levenshtein(first, second) / longest)


def test_edit_distance_of_long_texts_is_bounded_work() -> None:
    shared = "s" * 100_000
    assert edit_distance(shared + "a", shared + "b") == pytest.approx(1e-5, rel=1e-3)
    assert edit_distance("a" + shared, "b" * (LONGEST_EDIT_CHARACTERS + 2)) is None


# --- neighbours

said = st.fixed_dictionaries(
    {
        "position": st.integers(0, 3),
        "user": st.sampled_from([b"u", b"u", b"v", b""]),
        "prompt": st.sampled_from([[1, 2], [1, 2], [3], []]),
        "completion": st.sampled_from([[], [], [7, 8]]),
        "rating": st.sampled_from([None, None, 1.0, -1.0, 0.0, math.nan]),
        "rewards": st.lists(st.sampled_from([0.0, 0.3, 1.0, math.nan, math.inf, 1e308]), max_size=2),
        "over": st.sampled_from(["", "", "a", "b", "c", "r-0", "r-1", "gone"]),
        "edit": st.sampled_from(["", "", "", EDITED, "<end>" + SERVED[6:]]),
        "version": st.sampled_from(["v3", "v3", "v3", "base", "?"]),
        "temperature": st.sampled_from([0.7, 0.7, 0.0, math.nan]),
    }
)


def hostile(name: str, request: str | None, what: dict[str, object]) -> Trajectory:
    made = trajectory(name, request=request, position=what["position"], completion=what["completion"])  # type: ignore[arg-type]
    made.user_pseudonym, made.model_version = what["user"], what["version"]  # type: ignore[assignment]
    made.ClearField("prompt_token_ids")
    made.prompt_token_ids.extend(what["prompt"])  # type: ignore[arg-type]
    made.sampling.temperature = what["temperature"]  # type: ignore[assignment]
    if what["rating"] is not None:
        made.feedback.add(rating=what["rating"])  # type: ignore[arg-type]
    made.feedback.add(picked_over=what["over"], edited_text=what["edit"])  # type: ignore[arg-type]
    for value in what["rewards"]:  # type: ignore[attr-defined]
        made.rewards.add(source="test", value=value)
    return made


stored = st.lists(
    st.builds(
        hostile, st.sampled_from(["a", "b", "c", "d", "r-0", "r-1", "r-2"]), st.sampled_from([None, None, "r"]), said
    ),
    max_size=8,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(records=stored)
def test_one_trajectory_adds_or_removes_one_unit_and_replaces_none(
    kind: ExampleKind, records: list[Trajectory]
) -> None:
    """Neighbouring data sets differ in one unit, so a clipped sum differs by at most C."""
    constants = replace(PAIRS, kind=kind)
    dataset = built(records, constants)
    units = Counter(dataset.units)
    for removed in range(len(records)):
        remaining = Counter(built([*records[:removed], *records[removed + 1 :]], constants).units)
        assert ((units - remaining) + (remaining - units)).total() <= 1
    if kind != "pairs":
        used = sum(len(example) for unit in dataset.units for example in unit.examples)
        assert used + sum(dataset.left_out.values()) == len(records)


class SameOrder(SecureRandom):
    """Draws that depend on nothing but their number, so that what else changes is seen."""

    def uniform(self, count: int) -> np.ndarray:
        return np.random.default_rng(count).random(count)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(records=stored, most=st.integers(1, 3))
def test_one_user_adds_or_removes_one_unit_and_changes_no_other(
    kind: ExampleKind, records: list[Trajectory], most: int
) -> None:
    constants = replace(PAIRS, kind=kind, unit="user", examples_per_user=most)

    def units(of: list[Trajectory]) -> Counter[Unit]:
        found = build_dataset(of, constants, encode_answer=encode_answer, random=SameOrder(), vocabulary=VOCABULARY)
        return Counter(found.units)

    everyone = units(records)
    assert all(1 <= len(unit.examples) <= most for unit in everyone)
    assert everyone.total() <= len({record.user_pseudonym for record in records} - {b""})
    for user in (b"u", b"v"):
        others = units([record for record in records if record.user_pseudonym != user])
        alone = units([record for record in records if record.user_pseudonym == user])
        assert alone.total() <= 1
        assert everyone == others + alone


def test_a_user_is_one_unit_of_at_most_k_examples() -> None:
    records = [rated(f"{user}{i}", 1.0) for user in "uv" for i in range(6)]
    for record in records:
        record.user_pseudonym = record.id[0].encode()
    records[-1].user_pseudonym = b""
    dataset = built(records, replace(THUMBS, unit="user", examples_per_user=4))
    assert [len(unit.examples) for unit in dataset.units] == [4, 4]
    assert dataset.left_out == {"user is not known": 1, "beyond the user's examples": 3}


def test_another_users_record_of_the_same_id_changes_nothing() -> None:
    mine, theirs = rated("a", 1.0), rated("a", -1.0)
    theirs.user_pseudonym = b"v"
    by_user = replace(THUMBS, unit="user")
    assert set(built([mine, theirs], by_user).units) == {*built([mine], by_user).units, *built([theirs], by_user).units}
    assert built([mine, theirs], THUMBS).units == ()


def test_a_users_examples_are_drawn_without_bias() -> None:
    records = [rated(f"{i}", 1.0) for i in range(5)]
    names = {tuple(record.completion_token_ids): i for i, record in enumerate(records)}
    settings = replace(THUMBS, unit="user", examples_per_user=2)
    random, drawn = SecureRandom(), Counter[tuple[int, ...]]()
    for _ in range(2000):
        [unit] = build_dataset(
            records, settings, encode_answer=encode_answer, random=random, vocabulary=VOCABULARY
        ).units
        drawn[tuple(names[example[0].completion_ids] for example in unit.examples)] += 1
    counts = [drawn[pair] for pair in combinations(range(5), 2)]
    assert sum(counts) == 2000
    assert chisquare(counts).pvalue > 1e-6


# --- balance


def test_one_sided_feedback_is_named() -> None:
    def of(ups: int, downs: int) -> str | None:
        records = [rated(f"{i}", 1.0 if i < ups else -1.0) for i in range(ups + downs)]
        return imbalance(built(records, THUMBS))

    assert of(3, 0) == "all 3 answers have the reward 1: there is nothing to prefer"
    assert (of(1, 39) or "").startswith("39 of 40 answers have the reward -1")
    assert of(2, 38) is None
    assert of(0, 0) is None
    assert imbalance(built(whole("pairs"), PAIRS)) is None
