"""PPO on logged answers against TRL's GRPOTrainer (a ratio per token) and RLOOTrainer (a ratio per answer).

TRL has no PPOTrainer any more; these two train the same surrogates. What we call
the round's start is GRPO's old policy and reference, and our behaviour policy its
serving engine; both are far enough from the model for all clips to act.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from common.adapter import Adapter
from common.inference.model_folder import ModelFolder
from edge_node.training.units import Answer
from tests.conftest import changed
from tests.parity.noise_free import NoiseFreeTraining
from tests.parity.trl_capture import BATCH, STEPS, Captured, Logged, capture_grpo, capture_rloo, peft_start, token_logps

_RATE = 1e-3
_RLOO_RATE = 5e-5  # its gradients are sums over whole answers
_PLAIN = {"baseline": 0.0, "advantage_limit": 1e3}
_NO_DUAL_CLIP = 1e3
_IMPORTANCE_CAP = 1.5
_GROUP = 2


@pytest.fixture(scope="module")
def adapter(start: Adapter) -> Adapter:
    return changed(start, seed=1)


@pytest.mark.parametrize("kl_weight", [0.0, 0.04])
@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_per_token_ratios_move_every_weight_where_grpo_moves_it(
    model: ModelFolder, adapter: Adapter, tmp_path: Path, kl_weight: float, dual_clip: float | None
) -> None:
    batches = _logged(model, adapter, tools=True)
    theirs = capture_grpo(
        model,
        adapter,
        tmp_path,
        batches,
        beta=kl_weight,
        rate=_RATE,
        importance_cap=_IMPORTANCE_CAP,
        delta=dual_clip,
    )
    settings = {
        "kl_weight": kl_weight,
        "dual_clip": dual_clip or _NO_DUAL_CLIP,
        "importance_cap": _IMPORTANCE_CAP,
    }
    _assert_equal(_ours(model, adapter, "ppo", settings, batches, rate=_RATE), theirs, adapter)


def test_ratios_per_answer_move_every_weight_where_rloo_moves_it(
    model: ModelFolder, adapter: Adapter, tmp_path: Path
) -> None:
    batches = _logged(model, adapter, tools=False)  # RLOO knows no tool tokens
    theirs = capture_rloo(model, adapter, tmp_path, batches, rate=_RLOO_RATE)
    _assert_equal(_ours(model, adapter, "ppo-sequence", {}, batches, rate=_RLOO_RATE), theirs, adapter)


def test_a_group_as_one_unit_moves_every_weight_where_grpo_moves_it(
    model: ModelFolder, adapter: Adapter, tmp_path: Path
) -> None:
    batches = _logged(model, adapter, tools=True)
    theirs = capture_grpo(
        model,
        adapter,
        tmp_path,
        [_relative_to_groups(rows) for rows in batches],
        beta=0.02,
        rate=_RATE,
        importance_cap=_IMPORTANCE_CAP,
    )
    settings = {"kl_weight": 0.02, "dual_clip": _NO_DUAL_CLIP, "importance_cap": _IMPORTANCE_CAP, "group_size": _GROUP}
    ours = NoiseFreeTraining(model, adapter, "grpo", settings, rate=_RATE)
    for rows in batches:
        groups = _groups(rows)
        ours.step(
            [tuple(row.answer for row in group) for group in groups],
            [tuple(torch.tensor(row.start_logps) for row in group) for group in groups],
        )
    _assert_equal(ours, theirs, adapter)


def _groups(rows: list[Logged]) -> list[list[Logged]]:
    return [rows[first : first + _GROUP] for first in range(0, len(rows), _GROUP)]


def _relative_to_groups(rows: list[Logged]) -> list[Logged]:
    """Rewards as GRPOTrainer scales them: (reward - mean) / (standard deviation + 1e-4) within each group."""
    relative = []
    for group in _groups(rows):
        rewards = torch.tensor([row.answer.reward for row in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        relative += [
            replace(row, answer=replace(row.answer, reward=advantage))
            for row, advantage in zip(group, advantages.tolist(), strict=True)
        ]
    return relative


def _ours(
    model: ModelFolder,
    adapter: Adapter,
    objective: str,
    settings: dict[str, float],
    batches: list[list[Logged]],
    *,
    rate: float,
) -> NoiseFreeTraining:
    training = NoiseFreeTraining(model, adapter, objective, {**_PLAIN, **settings}, rate=rate)
    for rows in batches:
        training.step([(row.answer,) for row in rows], [(torch.tensor(row.start_logps),) for row in rows])
    return training


def _assert_equal(ours: NoiseFreeTraining, theirs: Captured, adapter: Adapter) -> None:
    for name, after in ours.weights.items():
        np.testing.assert_allclose(after, theirs.weights[name], atol=1e-7, rtol=0)
        assert np.abs(after - adapter.tensors[name]).max() > 1e-5  # it did move


def _logged(model: ModelFolder, adapter: Adapter, *, tools: bool) -> list[list[Logged]]:
    """Answers of different lengths with signed advantages; both older policies are near the adapter's own.

    Args:
        tools: whether the third token of each answer came from a tool.
    """
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    policy = peft_start(model, adapter).eval()
    generator = torch.Generator().manual_seed(11)

    def logged(a: int, b: int) -> Logged:
        prompt = tokenizer.encode(f"What is {a}+{b}?", add_special_tokens=False)
        completion = tokenizer.encode(f" {a + b}" + " ; no" * (a % 3), add_special_tokens=False)
        own = token_logps(policy, prompt, completion).detach()
        start, behaviour = own + 0.4 * torch.randn(2, len(own), generator=generator)
        written = tuple(not tools or place != 2 for place in range(len(completion)))
        advantage = float(torch.randn(1, generator=generator))
        answer = Answer(tuple(prompt), tuple(completion), written, tuple(behaviour.tolist()), advantage)
        return Logged(answer, tuple(start.tolist()))

    return [[logged(7 * step + row, 40 * row + step) for row in range(BATCH)] for step in range(STEPS)]
