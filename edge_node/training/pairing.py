"""Which judged answers are compared, such that one trajectory touches one comparison.

The guarantee is for adding or removing one trajectory, so one trajectory more may
add or remove one comparison and must not replace any: a replaced one would move a
sum of clipped gradients by 2 C where the noise is made for C. Every step here maps
inputs that differ by one element to outputs that differ by at most one, so their
composition does:

1. `without_duplicates` keeps one copy of a record, and none of records that
   contradict each other under one id.
2. A property of each record alone puts it into one cell: a record with a usable
   edit is its own cell; an answer of a request that had several goes by request
   and position, 0 with 1, 2 with 3, …; an only answer goes by user and prompt.
3. A cell makes at most one comparison. Without any one of its answers it makes
   the same comparison, or none, or, if it made none, one.

For a cell of a user and a prompt this is why an only answer cannot be in two pools,
one for picks and one for thumbs: whether someone picked over an answer is a property
of another record, and removing that record would move the answer between the pools
and change both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_node.training.units import Answer

SMALLEST_PREFERENCE = 0.05
"""Difference of summed rewards below which two answers count as equal; public."""

PASSED, FAILED = 0.6, 0.4
"""Summed rewards from which, and up to which, a verifier passed or failed an answer; public."""


@dataclass(frozen=True)
class JudgedAnswer:
    """A usable answer with what its user and the site's verifiers said about it.

    Attributes:
        position: among the answers to its request.
        user: pseudonym; empty where unknown.
        rating: the user's last; 0 where there is none.
        reward: sum of the reward vector; None where nothing scored it.
        picked_over: id of the answer this one was preferred to; empty where there is none.
        edit: what its user made of it; None where there is no usable edit.
    """

    id: str
    request_id: str
    position: int
    user: bytes
    answer: Answer
    rating: float = 0.0
    reward: float | None = None
    picked_over: str = ""
    edit: Answer | None = None

    @property
    def alone(self) -> bool:
        """Whether its request had no other choice."""
        return self.id == self.request_id

    @property
    def standing(self) -> int:
        """1 better, -1 worse, 0 unknown: picked, else rated, else verified; a property of the record alone."""
        if self.picked_over:
            return 1
        if self.rating:
            return 1 if self.rating > 0 else -1
        if self.reward is None:
            return 0
        return int(self.reward >= PASSED) - int(self.reward <= FAILED)


Comparison = tuple[JudgedAnswer, ...]
"""(better, worse); a whole group; or the one answer whose edit is better than itself."""


def without_duplicates(judged: Iterable[JudgedAnswer]) -> list[JudgedAnswer]:
    """One of the records under each id where they say the same, none where they do not."""
    versions: dict[str, set[JudgedAnswer]] = {}
    for one in judged:
        versions.setdefault(one.id, set()).add(one)
    return [one for same_id in versions.values() if len(same_id) == 1 for one in same_id]


def pairs(judged: Iterable[JudgedAnswer]) -> list[Comparison]:
    """Comparisons for the trajectory as privacy unit; ids must be distinct."""
    found: list[Comparison] = []
    of_request: dict[tuple[str, int], list[JudgedAnswer]] = {}
    of_prompt: dict[tuple[bytes, tuple[int, ...]], list[JudgedAnswer]] = {}
    for one in judged:
        if one.edit is not None:
            found.append((one,))
        elif not one.alone:
            of_request.setdefault((one.request_id, one.position // 2), []).append(one)
        elif one.user:
            of_prompt.setdefault((one.user, one.answer.prompt_ids), []).append(one)
    made = [_of_one_request(cell) for cell in of_request.values()]
    made += [_of_one_prompt(cell) for cell in of_prompt.values()]
    return found + [comparison for comparison in made if comparison is not None]


def _of_one_request(cell: Sequence[JudgedAnswer]) -> Comparison | None:
    """The two answers at an even and the next odd position, where both are there once.

    There is a comparison only in a cell of two, which any removal ends.
    """
    if {one.position % 2 for one in cell} != {0, 1} or len(cell) != 2:
        return None
    return preferred(*cell)


def _of_one_prompt(cell: Sequence[JudgedAnswer]) -> Comparison | None:
    """The one better answer with the one it was picked over, or with the one worse answer.

    An answer with a pick is compared with nothing but what it names. Removing the better
    answer, or its partner, ends the comparison: a pick's partner is fixed, and the one
    worse answer leaves none. Removing another answer changes neither that there is one
    better answer nor its partner.
    """
    better = [one for one in cell if one.standing > 0]
    if len(better) != 1:
        return None
    best = better[0]
    if best.picked_over:
        worse = [one for one in cell if one.id == best.picked_over and one is not best]
    else:
        worse = [one for one in cell if one.standing < 0]
    if len(worse) != 1 or not _comparable(best, worse[0]):
        return None
    return best, worse[0]


def preferred(first: JudgedAnswer, second: JudgedAnswer) -> Comparison | None:
    """(better, worse) by pick, else by ratings, else by rewards; None without a preference."""
    if not _comparable(first, second):
        return None
    picks = int(first.picked_over == second.id) - int(second.picked_over == first.id)
    if picks:
        ahead = float(picks)
    elif first.rating and second.rating and first.rating != second.rating:
        ahead = 1.0 if first.rating > second.rating else -1.0
    elif first.reward is not None and second.reward is not None:
        ahead = first.reward - second.reward
    else:
        return None
    if not abs(ahead) >= SMALLEST_PREFERENCE:
        return None
    return (first, second) if ahead > 0 else (second, first)


def _comparable(first: JudgedAnswer, second: JudgedAnswer) -> bool:
    """Two different answers to one prompt."""
    one, other = first.answer, second.answer
    return one.prompt_ids == other.prompt_ids and one.completion_ids != other.completion_ids


def pairs_of_one_user(judged: Iterable[JudgedAnswer]) -> list[Comparison]:
    """Comparisons among one user's answers, each answer in at most one, as many as there are.

    The user is the privacy unit: nothing here needs to be stable, it only must not look at other users.
    """
    found: list[Comparison] = []
    of_prompt: dict[tuple[int, ...], list[JudgedAnswer]] = {}
    for one in judged:
        if one.edit is not None:
            found.append((one,))
        else:
            of_prompt.setdefault(one.answer.prompt_ids, []).append(one)
    for answers in of_prompt.values():
        picked = _picked_pairs(answers)
        taken = {one.id for comparison in picked for one in comparison}
        found += picked + _best_with_worst([one for one in answers if one.id not in taken])
    return found


def _picked_pairs(answers: Sequence[JudgedAnswer]) -> list[Comparison]:
    free = {one.id: one for one in answers}
    found: list[Comparison] = []
    for one in answers:
        over = free.get(one.picked_over)
        if over is not None and one.id in free and preferred(one, over) == (one, over):
            found.append((one, over))
            del free[one.id], free[over.id]
    return found


def _best_with_worst(answers: Sequence[JudgedAnswer]) -> list[Comparison]:
    """The best with the worst, the second best with the second worst, while there is a preference."""
    ranked = sorted(answers, key=lambda one: (one.rating, one.reward or 0.0))
    found: list[Comparison] = []
    for worst, best in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
        if preferred(best, worst) == (best, worst):
            found.append((best, worst))
    return found


def groups(judged: Iterable[JudgedAnswer], size: int) -> list[Comparison]:
    """The answers at positions 0 … size - 1 of each request where each is there once; ids must be distinct.

    A group that lost an answer makes no smaller group, which would replace the whole one.
    """
    of_request: dict[str, list[JudgedAnswer]] = {}
    for one in judged:
        if one.position < size:
            of_request.setdefault(one.request_id, []).append(one)
    found = [tuple(sorted(answers, key=lambda one: one.position)) for answers in of_request.values()]
    return [
        group
        for group in found
        if [one.position for one in group] == list(range(size)) and len({one.answer.prompt_ids for one in group}) == 1
    ]
