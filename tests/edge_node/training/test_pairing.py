from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_node.training.pairing import (
    Comparison,
    JudgedAnswer,
    groups,
    pairs,
    pairs_of_one_user,
    without_duplicates,
)
from edge_node.training.units import Answer

PROMPT = (1, 2)


def judged(
    id: str,
    *,
    request: str | None = None,
    position: int = 0,
    user: bytes = b"u",
    prompt: tuple[int, ...] = PROMPT,
    completion: tuple[int, ...] | None = None,
    rating: float = 0.0,
    reward: float | None = None,
    over: str = "",
    edited: bool = False,
) -> JudgedAnswer:
    """An answer that is alone where no request is given."""
    ids = completion if completion is not None else tuple(id.encode())
    answer = Answer(prompt, ids, (True,) * len(ids))
    edit = Answer(prompt, (*ids, 99), (True,) * (len(ids) + 1)) if edited else None
    return JudgedAnswer(id, request or id, position, user, answer, rating, reward, over, edit)


def ids(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    return sorted(tuple(one.id for one in comparison) for comparison in comparisons)


def assert_stable(records: Sequence[JudgedAnswer], compare: Callable[[list[JudgedAnswer]], list[Comparison]]) -> None:
    """Without any one record there is one comparison more or less, or the same, and no other."""
    whole = Counter(compare(without_duplicates(records)))
    named = [one.id for comparison in whole.elements() for one in comparison]
    assert len(named) == len(set(named)), "a trajectory is in two comparisons"
    for left_out in range(len(records)):
        without = Counter(compare(without_duplicates([*records[:left_out], *records[left_out + 1 :]])))
        changed = (whole - without) + (without - whole)
        assert changed.total() <= 1, f"removing {records[left_out].id} changes {changed.total()} comparisons"


NAMES = ["a", "b", "c", "d", "r-0", "r-1", "r-2", "r-3"]

hostile = st.builds(
    judged,
    st.sampled_from(NAMES),
    request=st.sampled_from([None, None, "r", "a"]),
    position=st.integers(0, 3),
    user=st.sampled_from([b"u", b"u", b"v", b""]),
    prompt=st.sampled_from([PROMPT, PROMPT, (3,)]),
    completion=st.sampled_from([None, None, (7,)]),
    rating=st.sampled_from([-1.0, 0.0, 1.0, 0.5]),
    reward=st.sampled_from([None, 0.0, 0.5, 1.0, float("inf"), -float("inf")]),
    over=st.sampled_from(["", "", *NAMES, "gone"]),
    edited=st.sampled_from([False, False, False, True]),
)
"""Any record beside any other: repeated ids, positions taken twice, picks of oneself, of strangers and in rings."""

of_one_request = st.lists(
    st.builds(
        lambda position, rest: judged(f"r-{position}", request="r", position=position, **rest),
        st.integers(0, 5),
        st.fixed_dictionaries(
            {
                "rating": st.sampled_from([-1.0, 0.0, 1.0]),
                "reward": st.sampled_from([None, 0.0, 1.0]),
                "over": st.sampled_from(["", "r-0", "r-1"]),
            }
        ),
    ),
    max_size=7,
)


@settings(deadline=None, max_examples=600)
@given(st.lists(hostile, max_size=9) | of_one_request)
def test_one_trajectory_changes_one_pair(records: list[JudgedAnswer]) -> None:
    assert_stable(records, pairs)


@settings(deadline=None, max_examples=300)
@given(st.lists(hostile, max_size=9) | of_one_request)
def test_one_trajectory_changes_one_group(records: list[JudgedAnswer]) -> None:
    assert_stable(records, lambda distinct: groups(distinct, 2))


def test_every_graph_of_picks_and_thumbs_among_three_answers_to_one_prompt() -> None:
    said = [{"over": over, "rating": rating} for over in ("", "a", "b", "c") for rating in (-1.0, 0.0, 1.0)]
    for choice in product(said, repeat=3):
        assert_stable([judged(name, **what) for name, what in zip("abc", choice, strict=True)], pairs)  # type: ignore[arg-type]


def test_every_graph_of_picks_among_four_answers_to_one_prompt() -> None:
    said = [{"over": over} for over in ("a", "b", "c", "d")] + [{"rating": rating} for rating in (-1.0, 0.0, 1.0)]
    for choice in product(said, repeat=4):
        assert_stable([judged(name, **what) for name, what in zip("abcd", choice, strict=True)], pairs)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(hostile, max_size=9))
def test_only_different_answers_to_one_prompt_are_compared(records: list[JudgedAnswer]) -> None:
    for compare in (pairs, pairs_of_one_user):
        for comparison in compare(without_duplicates(records)):
            if len(comparison) == 2:
                better, worse = comparison
                assert better.answer.prompt_ids == worse.answer.prompt_ids
                assert better.answer.completion_ids != worse.answer.completion_ids
                assert better.edit is None and worse.edit is None


@settings(deadline=None)
@given(st.lists(hostile, max_size=9), st.randoms())
def test_the_order_of_the_records_decides_nothing(records: list[JudgedAnswer], random: object) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert Counter(pairs(without_duplicates(shuffled))) == Counter(pairs(without_duplicates(records)))


def test_copies_count_once_and_contradictions_not_at_all() -> None:
    copy, other = judged("a", rating=1.0), judged("a", rating=-1.0)
    assert without_duplicates([copy, judged("a", rating=1.0), judged("b")]) == [copy, judged("b")]
    assert without_duplicates([copy, other, judged("b")]) == [judged("b")]


def choice(position: int, **said: object) -> JudgedAnswer:
    return judged(f"r-{position}", request="r", position=position, **said)  # type: ignore[arg-type]


def test_answers_to_one_request_go_by_pick_then_rating_then_reward() -> None:
    ahead = {"reward": 1.0, "rating": 1.0}
    assert ids(pairs([choice(0, **ahead), choice(1, reward=0.0, rating=-1.0, over="r-0")])) == [("r-1", "r-0")]
    assert ids(pairs([choice(0, reward=0.0, rating=1.0), choice(1, reward=1.0, rating=-1.0)])) == [("r-0", "r-1")]
    assert ids(pairs([choice(0, reward=0.0, rating=1.0), choice(1, reward=1.0, rating=1.0)])) == [("r-1", "r-0")]
    assert ids(pairs([choice(0, reward=0.0, rating=1.0), choice(1, reward=1.0)])) == [("r-1", "r-0")]
    assert ids(pairs([choice(i, reward=float(i)) for i in range(4)])) == [("r-1", "r-0"), ("r-3", "r-2")]


def test_answers_to_one_request_without_a_preference_make_no_pair() -> None:
    assert pairs([choice(0, reward=0.5), choice(1, reward=0.54)]) == []
    assert pairs([choice(0, reward=0.5), choice(1)]) == []
    assert pairs([choice(0), choice(1)]) == []
    assert pairs([choice(0, over="r-1"), choice(1, over="r-0")]) == []
    assert pairs([choice(1, reward=0.0), choice(2, reward=1.0)]) == []
    assert pairs([choice(0, reward=0.0, completion=(7,)), choice(1, reward=1.0, completion=(7,))]) == []
    assert pairs([choice(0, reward=0.0), choice(1, reward=1.0), judged("x", request="r", position=1, reward=0.3)]) == []
    assert pairs([judged("r", reward=0.0), choice(1, reward=1.0)]) == []
    assert pairs([choice(0, reward=0.0), choice(1, reward=1.0, prompt=(3,))]) == []


def test_a_regenerated_answer_is_compared_with_what_it_was_picked_over() -> None:
    assert ids(pairs([judged("old"), judged("new", over="old")])) == [("new", "old")]
    assert ids(pairs([judged("old", rating=-1.0), judged("new", over="old")])) == [("new", "old")]
    assert ids(pairs([judged("old"), judged("new", over="old"), judged("c", rating=-1.0)])) == [("new", "old")]


def test_a_pick_without_its_partner_makes_no_pair() -> None:
    new = judged("new", over="old")
    for old in (
        judged("old", user=b"v"),
        judged("old", prompt=(3,)),
        judged("old", edited=True),
        judged("old", rating=1.0),
        judged("old", over="older"),
    ):
        assert all(len(comparison) == 1 for comparison in pairs([old, new]))
    assert pairs([judged("old", user=b""), judged("new", user=b"", over="old")]) == []
    assert pairs([judged("r-0", request="r"), judged("new", over="r-0")]) == []
    assert pairs([new, judged("c", rating=-1.0)]) == []
    assert pairs([judged("self", over="self"), judged("c", rating=-1.0)]) == []


def test_thumbs_and_verifiers_on_one_prompt_of_one_user() -> None:
    up, down = judged("up", rating=1.0), judged("down", rating=-1.0)
    assert ids(pairs([down, up, judged("silent")])) == [("up", "down")]
    assert ids(pairs([judged("pass", reward=0.9), judged("fail", reward=0.2)])) == [("pass", "fail")]
    assert pairs([judged("good", reward=0.55), judged("bad", reward=0.45)]) == []
    assert pairs([up, down, judged("again", rating=1.0)]) == []
    assert pairs([up, down, judged("again", rating=-1.0)]) == []
    assert pairs([up, judged("down", rating=-1.0, user=b"v")]) == []


def test_an_edited_answer_takes_part_in_nothing_else() -> None:
    edited = judged("old", rating=-1.0, edited=True)
    assert ids(pairs([edited, judged("new", over="old"), judged("up", rating=1.0)])) == [("old",)]
    assert ids(pairs([choice(0, reward=1.0, edited=True), choice(1, reward=0.0)])) == [("r-0",)]


def test_one_user_pairs_as_many_as_there_are() -> None:
    ups = [judged(f"up{i}", rating=1.0) for i in range(3)]
    downs = [judged(f"down{i}", rating=-1.0) for i in range(2)]
    picked = [judged("old"), judged("new", over="old")]
    found = pairs_of_one_user([*ups, *downs, *picked, judged("edit", edited=True)])
    assert len(found) == 4
    assert {("new", "old"), ("edit",)} <= set(ids(found))
    named = [one.id for comparison in found for one in comparison]
    assert len(named) == len(set(named))
    rated = [c for c in found if c[0].id not in ("new", "edit")]
    assert all(better.rating > worse.rating for better, worse in rated)


def test_groups_are_whole_or_absent() -> None:
    answers = [choice(i) for i in range(4)]
    assert ids(groups(reversed(answers), 3)) == [("r-0", "r-1", "r-2")]
    assert ids(groups(answers, 4)) == [("r-0", "r-1", "r-2", "r-3")]
    assert groups([answers[0], answers[2], answers[3]], 3) == []
    assert groups([*answers, judged("twin", request="r", position=1)], 3) == []
    assert groups([answers[0], choice(1, prompt=(3,))], 2) == []
