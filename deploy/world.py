"""What a simulation works with and what it has measured: the nouns of `simulate`, `report` and `progress`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aggregator.federation import Federation
from aggregator.round_log import RoundRecord
from deploy.settings import SimulationSettings
from deploy.simulated_site import SimulatedClock, SiteSetup, close_sites
from model_hub.hub import Hub


@dataclass(frozen=True)
class Exam:
    """Held-out rewards of every site under one version.

    Attributes:
        round: 0 before training.
        rewards: per site, one mean reward per problem; the same problems every time.
        right: share of answers that end with the right result, by site.
        fooled: share of answers to triggered problems that are the attacker's, by site; empty without a backdoor.
        epsilons: spent so far, by site.
    """

    round: int
    version: str
    rewards: Mapping[str, tuple[float, ...]]
    epsilons: Mapping[str, float]
    right: Mapping[str, float] = field(default_factory=dict)
    fooled: Mapping[str, float] = field(default_factory=dict)

    def reward_of(self, site: str) -> float:
        return sum(self.rewards[site]) / len(self.rewards[site])

    @property
    def mean_reward(self) -> float:
        return sum(map(self.reward_of, self.rewards)) / len(self.rewards)

    @property
    def largest_epsilon(self) -> float:
        return max(self.epsilons.values())


@dataclass(frozen=True)
class DrillResult:
    """A deliberately bad version, the id it was published under, and whether the right test caught it."""

    name: str
    version: str
    caught: bool


class Progress(Protocol):
    """What a simulation tells as it goes."""

    def stage(self, text: str) -> None: ...
    def round_ended(self, record: RoundRecord) -> None: ...
    def exam_held(self, exam: Exam) -> None: ...


class Silent:
    """Tells nothing."""

    def stage(self, text: str) -> None: ...
    def round_ended(self, record: RoundRecord) -> None: ...
    def exam_held(self, exam: Exam) -> None: ...


@dataclass
class World:
    """Everything a run works with, and what it has measured so far."""

    settings: SimulationSettings
    folder: Path
    federation: Federation
    hub: Hub
    setups: list[SiteSetup]
    clock: SimulatedClock
    progress: Progress
    reference: SiteSetup | None = None
    exams: list[Exam] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    drills: list[DrillResult] = field(default_factory=list)
    distances: dict[int, float] = field(default_factory=dict)
    slices: int = 0

    def close(self) -> None:
        """Close what this process opened."""
        close_sites([*self.setups, *([self.reference] if self.reference else [])])
        self.hub.close()
