"""Rewards a site computes by itself: the verifier of the task a conversation is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from common.chat import Message
from common.tasks import math

RewardParts = Mapping[str, float]
"""Weighted parts by source; their sum is the reward."""


def math_reward(messages: Sequence[Message]) -> RewardParts | None:
    """0.3·mean(step scores) + 0.5·final answer + 0.2·format, or None for other conversations."""
    score = math.score(messages)
    if score is None:
        return None
    return {
        "math.steps": 0.3 * score.steps,
        "math.answer": 0.5 * score.answer,
        "math.format": 0.2 * score.format,
    }


REWARDS: Mapping[str, Callable[[Sequence[Message]], RewardParts | None]] = {math.NAME: math_reward}
