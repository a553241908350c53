"""Replaying public golden prompts on both arms, for the hub's evidence.

The prompts come from the hub and are public, so the outcomes carry nothing of
the site's own traffic. Replays are not recorded as trajectories.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.chat import Message, has_invalid_tool_call
from common.inference.chat_tokenizer import MessagesRefused
from common.inference.engine import GenerationFailed
from common.inference.sampling import SamplingParameters
from edge_node.rewards.task_reward import REWARDS
from edge_node.serving.exchange import Chat, ChatRequest, RequestTooLong
from edge_node.serving.router import Choice
from model_hub.evidence import PairedOutcome


async def replay(
    service: Chat,
    prompts: Sequence[str],
    *,
    canary: Choice,
    control: Choice,
    task: str,
    max_tokens: int,
    seed: int,
) -> list[PairedOutcome]:
    """Answer every prompt on both arms with the same sampling seed."""

    async def outcome(index: int, prompt: str, choice: Choice) -> tuple[bool, float]:
        request = ChatRequest([Message("user", prompt)], SamplingParameters(), max_tokens, seed=seed + index)
        try:
            exchange = await service.answer(request, choice)
        except (GenerationFailed, RequestTooLong, MessagesRefused):
            return True, 0.0
        text = exchange.answers[0].text
        parts = REWARDS[task]([Message("user", prompt), Message("assistant", text)])
        return not text.strip() or has_invalid_tool_call(text), sum(parts.values()) if parts else 0.0

    both = [(outcome(i, p, canary), outcome(i, p, control)) for i, p in enumerate(prompts)]
    results = await asyncio.gather(*(run for pair in both for run in pair))
    return [
        PairedOutcome(canary_error, control_error, canary_reward, control_reward)
        for (canary_error, canary_reward), (control_error, control_reward) in zip(
            results[::2], results[1::2], strict=True
        )
    ]
