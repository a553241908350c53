"""Trajectories to privacy units.

What a site's records become is part of the mechanism. With trajectories as units,
each trajectory is in at most one unit, and adding or removing one adds or removes
at most one unit and replaces none; with users as units the same holds for a user's
trajectories together. Every step keeps this:

1. Whether a record is usable, and what it says, is a function of the record and of
   public constants (`_Reader`): nothing here is computed over the data, and no
   record can raise.
2. Records are compared as `pairing` describes.
3. With users, all of this happens within one user's records, and of more than K
   examples K are drawn, for each user alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from edge_node.collecting.trajectory_pb2 import Sampling, Trajectory
from edge_node.training.noise import SecureRandom
from edge_node.training.pairing import (
    Comparison,
    JudgedAnswer,
    groups,
    pairs,
    pairs_of_one_user,
    without_duplicates,
)
from edge_node.training.units import Answer, Example, ExampleKind, Unit

LONGEST_ANSWER_TOKENS = 2048
"""Prompt and completion together; longer ones are left out; public."""

LONGEST_LAG = 8
"""Versions an answer may be older than the one trained on; public."""

SMALLEST_REWARD, LARGEST_REWARD = -2.0, 5.0
"""Bounds a summed reward is clipped to; public."""

SMALLEST_EDIT, LARGEST_EDIT = 0.05, 0.7
"""Normalised distance between which an edit is a correction: not a typing slip, not another answer; public."""

LONGEST_EDIT_CHARACTERS = 4096
"""Characters between an edit's first and last change, above which it is not measured; public."""

SMALLEST_TOP_P = 0.05
"""Share of the distribution below which drawing from it is taking the likeliest; public."""

_SKEWED = 0.95
_VERSION = re.compile(r"v([0-9]{1,9})")
_LOGP_ROUNDING = 1e-3
_REDACTED = "[redacted:"


@dataclass(frozen=True)
class DatasetSettings:
    """Public constants of the plan and of the site's policy.

    Attributes:
        examples_per_user: K, with users as units.
        group_size: G, for groups.
        current_version: number n of `v<n>`, the version the plan trains on.
        base_digest: of the base model folder; token ids of another one mean something else.
    """

    kind: ExampleKind
    unit: Literal["trajectory", "user"]
    examples_per_user: int
    group_size: int
    current_version: int
    base_digest: str = ""


@dataclass(frozen=True)
class Dataset:
    """The units of a round.

    Attributes:
        left_out: trajectories by reason; exact counts, for the site's own eyes only.
    """

    units: tuple[Unit, ...]
    left_out: Mapping[str, int]


def build_dataset(
    trajectories: Iterable[Trajectory],
    settings: DatasetSettings,
    *,
    encode_answer: Callable[[str], tuple[int, ...]],
    random: SecureRandom,
    vocabulary: int,
    longest_tokens: int = LONGEST_ANSWER_TOKENS,
) -> Dataset:
    """All units of a round.

    Args:
        encode_answer: completion token ids with the end token; ValueError where a text cannot be an answer.
        vocabulary: of the base model; ids from there on come from another tokenizer.
        longest_tokens: of prompt and completion together, a public limit of the model.
    """
    reader = _Reader(settings, encode_answer, vocabulary, longest_tokens)
    left_out: Counter[str] = Counter()
    judged: list[JudgedAnswer] = []
    for trajectory in trajectories:
        reason = reader.objection(trajectory)
        if reason is None:
            judged.append(reader.judged(trajectory))
        else:
            left_out[reason] += 1
    if settings.unit == "trajectory":
        distinct = without_duplicates(judged)
        populations = [[comparison] for comparison in _comparisons(distinct, settings)]
        known = distinct
    else:
        own = [without_duplicates(records) for records in _by_user(judged)]
        populations = [_comparisons(records, settings) for records in own]
        known = [one for records in own for one in records]
    left_out["twice under one id"] += len(judged) - len(known)
    left_out["nothing to compare with"] += len(known) - _trajectories(populations)
    drawn = [_drawn(comparisons, settings, random) for comparisons in populations]
    left_out["beyond the user's examples"] += _trajectories(populations) - _trajectories(drawn)
    units = tuple(
        Unit(tuple(_example(comparison, settings.kind) for comparison in comparisons))
        for comparisons in drawn
        if comparisons
    )
    return Dataset(units, {reason: count for reason, count in left_out.items() if count})


def imbalance(dataset: Dataset) -> str | None:
    """What is one-sided about the answers' rewards, for the local log; None where nothing is, and for pairs."""
    rewards = [example[0].reward for unit in dataset.units for example in unit.examples if len(example) == 1]
    if not rewards:
        return None
    most_common, count = Counter(rewards).most_common(1)[0]
    if count == len(rewards):
        return f"all {count} answers have the reward {most_common:g}: there is nothing to prefer"
    if count > _SKEWED * len(rewards):
        return f"{count} of {len(rewards)} answers have the reward {most_common:g}: the others teach little"
    return None


def _by_user(judged: Iterable[JudgedAnswer]) -> Iterable[list[JudgedAnswer]]:
    of_user: dict[bytes, list[JudgedAnswer]] = {}
    for one in judged:
        of_user.setdefault(one.user, []).append(one)
    return of_user.values()


def _comparisons(distinct: Sequence[JudgedAnswer], settings: DatasetSettings) -> list[Comparison]:
    if settings.kind == "pairs":
        return pairs(distinct) if settings.unit == "trajectory" else pairs_of_one_user(distinct)
    if settings.kind == "groups":
        return groups(distinct, settings.group_size)
    return [(one,) for one in distinct]


def _drawn(comparisons: list[Comparison], settings: DatasetSettings, random: SecureRandom) -> list[Comparison]:
    """At most K of a user's comparisons, every K of them equally likely."""
    most = settings.examples_per_user
    if settings.unit == "trajectory" or len(comparisons) <= most:
        return comparisons
    return [comparisons[i] for i in sorted(np.argsort(random.uniform(len(comparisons)))[:most])]


def _trajectories(populations: Iterable[Sequence[Comparison]]) -> int:
    return sum(len(comparison) for comparisons in populations for comparison in comparisons)


def _example(comparison: Comparison, kind: ExampleKind) -> Example:
    if kind == "pairs" and len(comparison) == 1:
        (edited,) = comparison
        assert edited.edit is not None
        return edited.edit, edited.answer
    return tuple(one.answer for one in comparison)


@dataclass(frozen=True)
class _Reader:
    """Reads one record at a time; what it says depends on the record and on these constants alone."""

    settings: DatasetSettings
    encode_answer: Callable[[str], tuple[int, ...]]
    vocabulary: int
    longest_tokens: int

    def objection(self, trajectory: Trajectory) -> str | None:
        """Why a record is not used; None where it is."""
        return next((reason for holds, reason in self._objections(trajectory) if holds), None)

    def _objections(self, t: Trajectory) -> Iterator[tuple[bool, str]]:
        settings, version = self.settings, version_number(t.model_version)
        prompt, completion = t.prompt_token_ids, t.completion_token_ids
        yield bool(t.error), "failed"
        yield not prompt or not completion, "redacted or without token ids"
        yield t.base_digest != settings.base_digest, "of another base model"
        yield max((*prompt, *completion), default=0) >= self.vocabulary, "token ids of another tokenizer"
        yield len(prompt) + len(completion) > self.longest_tokens, "too long"
        yield len(t.assistant_mask) != len(completion), "assistant mask does not match the completion"
        yield not any(t.assistant_mask), "nothing in it was written by the model"
        yield len(t.logprobs) not in (0, len(completion)), "log-probabilities do not match the completion"
        yield not all(-math.inf < logp <= _LOGP_ROUNDING for logp in t.logprobs), "log-probabilities out of range"
        yield not all(math.isfinite(reward.value) for reward in t.rewards), "reward is not a number"
        yield not math.isfinite(_rating(t)), "rating is not a number"
        yield version is None, "version is not readable"
        yield version is not None and settings.current_version - version > LONGEST_LAG, "too old a version"
        yield settings.unit == "user" and not t.user_pseudonym, "user is not known"
        if settings.kind in ("answers", "groups"):
            yield not t.rewards, "no reward"
            yield _greedy(t.sampling), "drawn greedily"
        if settings.kind == "thumbs":
            yield _rating(t) == 0, "not rated"

    def judged(self, t: Trajectory) -> JudgedAnswer:
        """What a usable record says."""
        sampled = self.settings.kind in ("answers", "groups")
        rating, total = _rating(t), sum(reward.value for reward in t.rewards)
        reward = 0.0
        if sampled:
            reward = min(max(total, SMALLEST_REWARD), LARGEST_REWARD)
        elif self.settings.kind == "thumbs":
            reward = math.copysign(1.0, rating)
        answer = Answer(
            prompt_ids=tuple(t.prompt_token_ids),
            completion_ids=tuple(t.completion_token_ids),
            written=tuple(t.assistant_mask),
            behaviour_logps=tuple(t.logprobs),
            reward=reward,
            temperature=t.sampling.temperature if sampled else 1.0,
            adapter_digest=t.adapter_digest,
        )
        return JudgedAnswer(
            id=t.id,
            request_id=t.request_id,
            position=t.choice_index,
            user=t.user_pseudonym,
            answer=answer,
            rating=rating,
            reward=total if t.rewards else None,
            picked_over=next((event.picked_over for event in reversed(t.feedback) if event.picked_over), ""),
            edit=self._edit(t, answer) if self.settings.kind == "pairs" else None,
        )

    def _edit(self, t: Trajectory, answer: Answer) -> Answer | None:
        """The user's last edit as an answer, where it is a correction that can be trained on."""
        edited = next((event.edited_text for event in reversed(t.feedback) if event.edited_text), "")
        served = t.messages[-1] if t.messages else None
        if not edited or _REDACTED in edited or served is None or served.role != "assistant":
            return None
        distance = edit_distance(served.content, edited)
        if distance is None or not SMALLEST_EDIT < distance < LARGEST_EDIT:
            return None
        try:
            ids = tuple(self.encode_answer(edited))
        except ValueError:
            return None
        edit = replace(answer, completion_ids=ids, written=(True,) * len(ids), behaviour_logps=())
        usable = ids and max(ids) < self.vocabulary and edit.length <= self.longest_tokens
        return edit if usable and ids != answer.completion_ids else None


def _greedy(sampling: Sampling) -> bool:
    """Whether the answer was as good as fixed: its log-probabilities say nothing of what else might have been drawn."""
    if not 0 < sampling.temperature < math.inf or sampling.top_k == 1:
        return True
    return 0 < sampling.top_p < SMALLEST_TOP_P  # 0: not recorded


def _rating(trajectory: Trajectory) -> float:
    """The last rating its user gave; 0 where there is none."""
    return next((event.rating for event in reversed(trajectory.feedback) if event.HasField("rating")), 0.0)


def edit_distance(first: str, second: str) -> float | None:
    """Levenshtein distance over the longer text's length; None where what differs is too long to measure."""
    longest = max(len(first), len(second))
    if not longest:
        return 0.0
    same = _shared(first, second)
    first, second = first[same:], second[same:]
    same = _shared(first[::-1], second[::-1])
    first, second = first[: len(first) - same], second[: len(second) - same]
    if max(len(first), len(second)) > LONGEST_EDIT_CHARACTERS:
        return None
    other = np.array([ord(character) for character in second], np.int64)
    inserted = np.arange(len(second) + 1)
    row = inserted
    for character in first:
        changed = np.minimum(row[:-1] + (other != ord(character)), row[1:] + 1)
        best = np.concatenate([row[:1] + 1, changed])
        row = np.minimum.accumulate(best - inserted) + inserted
    return float(row[-1]) / longest


def _shared(first: str, second: str) -> int:
    """Characters two texts begin with alike."""
    differs = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differs, min(len(first), len(second)))


def version_number(model_version: str) -> int | None:
    """n of `v<n>`, 0 for `base`; None where it is neither."""
    if model_version == "base":
        return 0
    found = _VERSION.fullmatch(model_version)
    return int(found[1]) if found else None
