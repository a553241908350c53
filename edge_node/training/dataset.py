"""Trajectories to preference pairs.

A pair is two answers to one request, taken by their fixed positions (0 with 1,
2 with 3, …), the better one by reward first. So every trajectory is in at most
one pair, and removing one trajectory removes at most that pair and changes no
other: what is private per pair is private per trajectory.

Trajectories whose text was redacted carry no token ids and are left out, as are
failed answers and pairs without a preference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_node.collecting.trajectory_pb2 import Trajectory

SMALLEST_PREFERENCE = 0.05
"""Reward difference below which two answers count as equal; public."""


@dataclass(frozen=True)
class PreferencePair:
    """Token ids as served: one prompt and its better and worse completion."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


@dataclass(frozen=True)
class PairBatch:
    """Right-padded rows [2U, T]: the chosen completions of U pairs, then the rejected ones."""

    ids_BT: Tensor
    completion_mask_BT: Tensor
    shortest_prompt: int

    @property
    def pairs(self) -> int:
        return len(self.ids_BT) // 2


def reward_of(trajectory: Trajectory) -> float:
    """Sum of the reward vector."""
    return sum(reward.value for reward in trajectory.rewards)


def preference_pairs(trajectories: Iterable[Trajectory]) -> list[PreferencePair]:
    """All pairs with a preference, in order of the requests."""
    by_position: dict[tuple[str, int], dict[int, Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.completion_token_ids and trajectory.rewards and not trajectory.error:
            place = (trajectory.request_id, trajectory.choice_index // 2)
            by_position.setdefault(place, {})[trajectory.choice_index % 2] = trajectory
    pairs = []
    for two in by_position.values():
        if len(two) < 2:
            continue
        better, worse = sorted(two.values(), key=reward_of, reverse=True)
        if reward_of(better) - reward_of(worse) < SMALLEST_PREFERENCE:
            continue
        pairs.append(
            PreferencePair(
                tuple(better.prompt_token_ids),
                tuple(better.completion_token_ids),
                tuple(worse.completion_token_ids),
            )
        )
    return pairs


def collate(pairs: list[PreferencePair], *, pad_id: int) -> PairBatch:
    """Pad pairs to one batch; causal attention needs no mask with padding on the right."""
    rows = [(p.prompt_ids, p.chosen_ids) for p in pairs] + [(p.prompt_ids, p.rejected_ids) for p in pairs]
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids_BT = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), longest)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids_BT[row, :end] = torch.tensor(prompt + completion)
        mask_BT[row, len(prompt) : end] = 1.0
    return PairBatch(ids_BT, mask_BT, min(len(prompt) for prompt, _ in rows))
