"""Which records a round takes: each of them once, also where they wait for a commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from deploy.world import World
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.node import EdgeNode
from edge_node.training.dataset import Dataset
from tests.edge_node.training.test_trainer import BUILD, plan_of, signed


@pytest.fixture
def committing(world: World) -> Iterator[EdgeNode]:
    """A node whose rounds take what was committed."""
    config = world.setups[0].config
    training = config.training.model_copy(update={"records": "committed"})
    node = EdgeNode(config.model_copy(update={"training": training}), clock=world.clock)
    node.look_again()
    yield node
    node.close()


class Rounds:
    """What each round of a node is given to make units of."""

    def __init__(self, world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.node = world, node
        self.taken: list[list[str]] = []
        monkeypatch.setattr(BUILD, self._build)

    def _build(self, trajectories: Sequence[Trajectory], *_: object, **__: object) -> Dataset:
        self.taken.append([t.id for t in trajectories])
        return Dataset((), {})

    def collect(self, *names: str) -> None:
        for name in names:
            made = Trajectory(id=name, request_id=name, task_id=name, collected_at_s=self.world.clock())
            self.node.store.append([made])
        self._later()

    def commit(self, name: str) -> None:
        self.node.contract.commit(key_id="local", task_id=name)
        self._later()

    def train(self) -> list[str]:
        plan = plan_of(self.world, len(self.taken) + 1)
        self.node.sealed_update(*signed(self.world, plan), "")
        self._later()
        return self.taken[-1]

    def _later(self) -> None:
        self.world.clock.set(self.world.clock() + 60)


def test_what_its_agent_has_not_committed_waits(
    world: World, committing: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record collected before a round and committed after it is the next round's; each is taken once."""
    rounds = Rounds(world, committing, monkeypatch)
    rounds.collect("a", "b", "never")
    rounds.commit("a")
    assert rounds.train() == ["a"]
    rounds.collect("c")
    rounds.commit("b")
    rounds.commit("a")  # again
    rounds.commit("c")
    assert committing.dataset(plan_of(world).training).left_out == {"not committed": 1}
    assert rounds.taken.pop() == ["b", "c"]  # what was just looked at
    assert rounds.train() == ["b", "c"]


def test_by_default_a_round_takes_all_it_has_not_had(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(world, node, monkeypatch)
    rounds.collect("a", "b")
    rounds.commit("a")
    assert rounds.train() == ["a", "b"]
    rounds.commit("b")
    rounds.collect("c")
    assert rounds.train() == ["c"]


def test_what_the_law_no_longer_allows_is_not_trained_on_however_late_its_commit(
    world: World, committing: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(world, committing, monkeypatch)
    began_s = world.clock()
    policy = world.setups[0].config.policy
    policy.write_text(policy.read_text() + "[collection]\nretention_days = 1\n")
    rounds.collect("old")
    world.clock.set(began_s + 600)
    rounds.collect("new")
    world.clock.set(began_s + 86_400 - 10)
    rounds.commit("old")
    rounds.commit("new")
    assert rounds.train() == ["new"]
