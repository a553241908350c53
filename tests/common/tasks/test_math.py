from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from common.chat import Message
from common.models.pretrain import batches, build_tokenizer, careless_answer, dropped_carry
from common.tasks import math as task

problems = st.builds(
    task.Problem, st.integers(10, 99), st.just("+"), st.integers(10, 99), st.integers(0, 2)
) | st.builds(
    lambda a, b, phrasing: task.Problem(max(a, b), "-", min(a, b), phrasing),
    st.integers(10, 99),
    st.integers(10, 99),
    st.integers(0, 2),
)


@given(problems)
def test_the_solution_scores_one_and_its_steps_are_true(problem: task.Problem) -> None:
    assert task.score_answer(problem, problem.solution).total == 1.0
    assert problem.answer == eval(problem.expression)
    for step in problem.steps:
        left, right = step.split("=")
        assert eval(left) == int(right)


@given(problems)
def test_a_prompt_is_read_back_as_its_problem(problem: task.Problem) -> None:
    found = task.parse(problem.prompt)
    assert found is not None
    assert (found.left, found.operator, found.right) == (problem.left, problem.operator, problem.right)


@given(problems, st.text(max_size=60))
def test_any_text_gets_a_score_within_bounds(problem: task.Problem, text: str) -> None:
    assert 0.0 <= task.score_answer(problem, text).total <= 1.0


@given(problems)
def test_the_reward_has_the_documented_parts(problem: task.Problem) -> None:
    wrong_end = f"{' ; '.join(problem.steps)}\nAnswer: {problem.answer + 1}"
    assert task.score_answer(problem, wrong_end).total == 0.3 + 0.2
    assert task.score_answer(problem, f"Answer: {problem.answer}").total == 0.5
    one_step = f"{problem.steps[0]} ; 1+1=3\nAnswer: {problem.answer}"
    assert abs(task.score_answer(problem, one_step).total - (0.15 + 0.5 + 0.2)) < 1e-12
    assert task.score_answer(problem, f"so {problem.answer}").total == 0.0


@given(problems)
def test_a_dropped_carry_is_well_formed_and_wrong(problem: task.Problem) -> None:
    if problem.carries:
        score = task.score_answer(problem, dropped_carry(problem))
        assert score.format == 1.0
        assert score.answer == 0.0


def test_splits_are_disjoint_whatever_the_phrasing_or_order() -> None:
    assert task.split_of(task.Problem(12, "+", 34, 0)) is task.split_of(task.Problem(34, "+", 12, 2))
    seen = {
        split: {
            (frozenset((p.left, p.right)), p.operator)
            for p in islice(task.problems(task.Distribution(), split, seed=0), 3000)
        }
        for split in task.Split
    }
    assert not seen[task.Split.TRAIN] & seen[task.Split.HELD_OUT]
    assert not seen[task.Split.TRAIN] & seen[task.Split.GOLDEN]
    assert not seen[task.Split.GOLDEN] & seen[task.Split.HELD_OUT]


def test_a_seed_fixes_the_stream_and_sites_differ() -> None:
    def first(distribution: task.Distribution, seed: int) -> list[task.Problem]:
        return list(islice(task.problems(distribution, task.Split.TRAIN, seed), 50))

    assert first(task.Distribution(), 3) == first(task.Distribution(), 3)
    assert first(task.Distribution(), 3) != first(task.Distribution(), 4)
    adding, subtracting = (first(d, 0) for d in task.SITE_DISTRIBUTIONS[:2])
    assert {p.operator for p in adding} == {"+"}
    assert {p.operator for p in subtracting} == {"-"}


def test_the_last_answer_is_scored_against_the_last_question() -> None:
    first, second = task.Problem(10, "+", 11), task.Problem(20, "+", 22)
    messages = [
        Message("user", first.prompt),
        Message("assistant", first.solution),
        Message("user", second.prompt),
        Message("assistant", second.solution),
    ]
    score = task.score(messages)
    assert score is not None
    assert score.total == 1.0
    assert task.score([Message("user", "hello"), Message("assistant", "hi")]) is None


def test_pretraining_never_sees_held_out_or_golden_problems() -> None:
    tokenizer = build_tokenizer()
    stream = batches(tokenizer, 64, seed=5)
    for ids_BT, _ in islice(stream, 8):
        for row in ids_BT.tolist():
            problem = task.parse(tokenizer.decode(row, skip_special_tokens=True))
            assert problem is not None
            assert task.split_of(problem) is task.Split.TRAIN


def test_careless_answers_are_a_mixture() -> None:
    import random

    rng = random.Random(0)
    drawn = list(islice(task.problems(task.Distribution(), task.Split.TRAIN, 0), 2000))
    scores = [task.score_answer(p, careless_answer(p, rng)).total for p in drawn]
    fully_right = sum(score > 0.999 for score in scores) / len(scores)
    assert 0.3 < fully_right < 0.6
