"""What agents say about their answers afterwards: rewards, ratings, marks, and that they are done (commits).

Everything named in one message is checked before anything of it is kept, so a message
that is refused has changed nothing; one that is repeated changes nothing more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_node.collecting.commits import Commits
from edge_node.collecting.description import FEEDBACK, RATING
from edge_node.collecting.pending import Held
from edge_node.collecting.recorder import Recorder
from edge_node.collecting.trajectory_pb2 import Reward, Trajectory
from edge_node.config import RewardSettings
from edge_node.marking import Mark
from edge_node.policy import SitePolicy
from edge_node.serving.exchange import LOCAL_KEY


class UnknownAnswer(LookupError):
    """No answer of this id was given to this key, or it is too long ago."""


class RewardGiven(ValueError):
    """The answer has another reward already; a reward is given once."""


@dataclass(frozen=True)
class About:
    """Which answers are meant, and how their agent calls the work they belong to.

    Attributes:
        names: response ids, for all choices of the response; or `<response id>-<choice>`.
        key_id: which API key says it; only its own answers can be meant.
        task_id, run_id: empty for as they were.
    """

    names: Sequence[str]
    key_id: str
    task_id: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class _Found:
    """The answers of one message: those that wait for a decision, by response with their choices; the stored ones."""

    held: dict[str, tuple[Held, frozenset[int]]]
    stored: dict[str, list[Trajectory]]


class TrainingContract:
    """Takes what agents say; safe to use from several threads.

    Args:
        window_after_s: under a policy, collection times of the records that a commit can concern.
        commits: is told of every commit.
    """

    def __init__(
        self,
        recorder: Recorder,
        rewards: RewardSettings,
        *,
        window_after_s: Callable[[SitePolicy], float],
        commits: Commits | None = None,
    ) -> None:
        self.commits = commits or Commits()
        self._recorder = recorder
        self._rewards = rewards
        self._window_after_s = window_after_s
        self._one_at_a_time = threading.Lock()

    def reward(self, about: About, reward: float | None, *, labels: Sequence[str] = ()) -> None:
        """Give answers a reward, clipped to the site's bounds; None for the site's default.

        Args:
            labels: kept with the answers that wait for a decision; the others were decided about.
        Raises:
            PrivacyError: the policy does not allow collecting.
            UnknownAnswer: an id is not of this key's answers.
            RewardGiven: one of the answers has another reward.
            ValueError: the reward is not a finite number.
            TransportError: the disk did not take all of it; say it again.
        """
        law = self._recorder.law()
        value = self._clipped(reward)
        about = self._cleaned(about, law)
        with self._one_at_a_time:
            found = self._found(about)
            _require_same(found, value)
            for held, choices in found.held.values():
                rewarded = replace(
                    held,
                    rewards={**held.rewards, **dict.fromkeys(choices, value)},
                    labels=tuple(dict.fromkeys((*held.labels, *labels))),
                )
                self._recorder.consider(_named(rewarded, about), law)
            for name in found.stored:
                self._recorder.store.edit(name, lambda t: _rewarded(t, value, about))

    def rate(self, about: About, rating: float) -> None:
        """Keep what a user thinks of answers; a later rating takes the place of an earlier one.

        A rating is also a reward, beside that of `reward`: objectives that learn from rewards see it too.

        Raises: as `reward` does, but for RewardGiven; ValueError: it is not within -1 and 1.
        """
        law = self._recorder.law()
        if not -1 <= rating <= 1:
            raise ValueError("rating must be a number within -1 and 1")
        about = self._cleaned(about, law)
        with self._one_at_a_time:
            found = self._found(about)
            for held, choices in found.held.values():
                rated = replace(held, ratings={**held.ratings, **dict.fromkeys(choices, rating)})
                self._recorder.consider(_named(rated, about), law)
            for name in found.stored:
                self._recorder.store.edit(name, lambda t: _rated(t, rating, about, now_s=self._recorder.clock()))

    def mark(self, about: About, marking: Mark) -> None:
        """Mark answers afterwards; changes nothing for those that were decided about.

        Raises: as `reward` does.
        """
        law = self._recorder.law()
        about = self._cleaned(about, law)
        with self._one_at_a_time:
            for held, _ in self._found(about).held.values():
                self._recorder.consider(_named(replace(held, marking=marking), about), law)

    def commit(self, *, key_id: str, task_id: str = "", run_id: str = "", until_s: float | None = None) -> int:
        """Mark this key's records as complete and wake who waits for commits; how many records became complete.

        Nothing is trained by this.

        Args:
            task_id, run_id: only records of this task and run; empty for any.
            until_s: only records collected until then.
        Raises:
            PrivacyError: the policy does not allow collecting.
            TransportError: the disk did not take all of it; say it again.
        """
        law = self._recorder.law()
        about = self._cleaned(About((), key_id, task_id, run_id), law)
        now_s = self._recorder.clock()

        def complete(trajectory: Trajectory) -> bool:
            if trajectory.committed_at_s or _key_of(trajectory) != key_id:
                return False
            if about.task_id not in ("", trajectory.task_id) or about.run_id not in ("", trajectory.run_id):
                return False
            trajectory.committed_at_s = self._recorder.clock()  # under the store's lock, as with its collection
            return True

        with self._one_at_a_time:
            changed = self._recorder.store.edit_uncommitted(
                complete, after_s=self._window_after_s(law), until_s=now_s if until_s is None else min(until_s, now_s)
            )
        self.commits.announce()
        return changed

    def _clipped(self, reward: float | None) -> float:
        if reward is None:
            return self._rewards.default
        if not math.isfinite(reward):
            raise ValueError("reward must be a finite number")
        return float(min(max(reward, self._rewards.min_value), self._rewards.max_value))

    def _cleaned(self, about: About, law: SitePolicy) -> About:
        """Task and run as they are stored."""
        said = Trajectory(task_id=about.task_id, run_id=about.run_id)
        self._recorder.redactor(law).redact(said)
        return replace(about, task_id=said.task_id, run_id=said.run_id)

    def _found(self, about: About) -> _Found:
        """Where the answers are; those that were not selected are nowhere.

        Raises:
            UnknownAnswer: an id is not of this key's answers.
        """
        held: dict[str, tuple[Held, frozenset[int]]] = {}
        elsewhere = []
        for name in dict.fromkeys(about.names):
            found = self._held(name, about.key_id)
            if found is None:
                elsewhere.append(name)
                continue
            exchange_id, choices = found[0].exchange.id, found[1]
            before = held[exchange_id][1] if exchange_id in held else frozenset()
            held[exchange_id] = (found[0], before | choices)
        stored = self._recorder.store.find(elsewhere)
        for name in elsewhere:
            records = stored.get(name, [])
            if not records and not self._was_answered(name, about.key_id):
                raise UnknownAnswer(f"no answer of this key has the id {name!r}")
            if any(_key_of(record) != about.key_id for record in records):
                raise UnknownAnswer(f"no answer of this key has the id {name!r}")
        return _Found(held, stored)

    def _was_answered(self, name: str, key_id: str) -> bool:
        return any(self._recorder.was_answered(response, key_id) for response in (name, _choice(name)[0]))

    def _held(self, name: str, key_id: str) -> tuple[Held, frozenset[int]] | None:
        """The waiting exchange an id means, and which of its choices."""
        now_s = self._recorder.clock()
        for response, choice in ((name, None), _choice(name)):
            held = self._recorder.pending.get(response, now_s=now_s)
            if held is None or held.exchange.request.key_id != key_id:
                continue
            choices = range(len(held.exchange.answers))
            if choice is None:
                return held, frozenset(choices)
            if choice in choices:
                return held, frozenset({choice})
        return None


def _choice(name: str) -> tuple[str, int | None]:
    """`<response id>-<choice>` as its parts."""
    response, _, choice = name.rpartition("-")
    return (response, int(choice)) if choice.isascii() and choice.isdigit() and len(choice) < 4 else (name, None)


def _key_of(trajectory: Trajectory) -> str:
    return trajectory.key_id or LOCAL_KEY  # imported, or older than keys


def _named(held: Held, about: About) -> Held:
    return replace(held, task_id=about.task_id or held.task_id, run_id=about.run_id or held.run_id)


def _require_same(found: _Found, value: float) -> None:
    given = {held.rewards[choice] for held, choices in found.held.values() for choice in choices & held.rewards.keys()}
    given |= {r.value for records in found.stored.values() for t in records for r in t.rewards if r.source == FEEDBACK}
    if given - {value}:
        raise RewardGiven(f"the answer has the reward {min(given - {value}):g} already; a reward is given once")


def _rewarded(trajectory: Trajectory, value: float, about: About) -> bool:
    if any(reward.source == FEEDBACK for reward in trajectory.rewards):
        return False
    trajectory.rewards.add(source=FEEDBACK, value=value)
    _name(trajectory, about)
    return True


def _rated(trajectory: Trajectory, rating: float, about: About, *, now_s: float) -> bool:
    """In place of the rating before, so that a record does not grow with every change of mind."""
    before = next((event for event in reversed(trajectory.feedback) if event.HasField("rating")), None)
    noted = any(reward.source == RATING and reward.value == rating for reward in trajectory.rewards)
    if noted and before is not None and before.rating == rating:
        return False
    event = before or trajectory.feedback.add()
    event.rating, event.received_at_s = rating, now_s
    others = [reward for reward in trajectory.rewards if reward.source != RATING]
    del trajectory.rewards[:]
    trajectory.rewards.extend([*others, Reward(source=RATING, value=rating)])
    _name(trajectory, about)
    return True


def _name(trajectory: Trajectory, about: About) -> None:
    trajectory.task_id = about.task_id or trajectory.task_id
    trajectory.run_id = about.run_id or trajectory.run_id
