from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.training.dataset import PreferencePair, collate, preference_pairs


def trajectory(request: str, index: int, reward: float, *, tokens: tuple[int, ...] | None = None) -> Trajectory:
    made = Trajectory(
        id=f"{request}-{index}",
        request_id=request,
        choice_index=index,
        prompt_token_ids=[1, 2],
        completion_token_ids=tokens if tokens is not None else [10 * index + 7, hash(request) % 50 + 60],
    )
    made.rewards.add(source="math.answer", value=reward)
    return made


def test_the_better_answer_is_chosen() -> None:
    pairs = preference_pairs([trajectory("r", 0, 0.2, tokens=(5,)), trajectory("r", 1, 0.7, tokens=(6,))])
    assert pairs == [PreferencePair((1, 2), (6,), (5,))]


def test_what_cannot_be_compared_makes_no_pair() -> None:
    lonely = [trajectory("a", 0, 1.0)]
    equal = [trajectory("b", 0, 0.5), trajectory("b", 1, 0.52)]
    redacted = [trajectory("c", 0, 0.0, tokens=()), trajectory("c", 1, 1.0)]
    failed = [trajectory("d", 0, 0.0), trajectory("d", 1, 1.0)]
    failed[0].error = "GenerationFailed"
    unrewarded = [trajectory("e", 0, 0.0), trajectory("e", 1, 1.0)]
    unrewarded[1].ClearField("rewards")
    assert preference_pairs([*lonely, *equal, *redacted, *failed, *unrewarded]) == []


requests = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=6)


@settings(deadline=None)
@given(requests, st.data())
def test_removing_a_trajectory_removes_at_most_its_own_pair(rewards: list[list[float]], data: st.DataObject) -> None:
    """The unit of the guarantee is the trajectory: neighbours differ in one pair at most."""
    trajectories = [
        trajectory(f"r{i}", j, reward, tokens=(100 * i + j,))
        for i, answers in enumerate(rewards)
        for j, reward in enumerate(answers)
    ]
    all_pairs = preference_pairs(trajectories)
    used = [token for pair in all_pairs for token in (*pair.chosen_ids, *pair.rejected_ids)]
    assert len(used) == len(set(used))  # every trajectory is in at most one pair
    removed = data.draw(st.integers(0, len(trajectories) - 1))
    remaining = preference_pairs(trajectories[:removed] + trajectories[removed + 1 :])
    assert set(remaining) <= set(all_pairs)
    assert len(all_pairs) - len(remaining) <= 1


def test_rows_are_chosen_then_rejected_and_masked_to_completions() -> None:
    batch = collate([PreferencePair((1, 2, 3), (4,), (5, 6)), PreferencePair((1, 2), (7, 8), (9,))], pad_id=0)
    assert batch.ids_BT.tolist() == [[1, 2, 3, 4, 0], [1, 2, 7, 8, 0], [1, 2, 3, 5, 6], [1, 2, 9, 0, 0]]
    assert batch.completion_mask_BT.tolist() == [[0, 0, 0, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1], [0, 0, 1, 0, 0]]
    assert (batch.pairs, batch.shortest_prompt) == (2, 2)
