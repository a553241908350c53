"""What a person sees while a simulation runs, in a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from aggregator.round_log import RoundRecord
from common.update import Refusal
from deploy.progress import Terminal
from deploy.settings import SimulationSettings
from deploy.world import Exam
from model_hub.rollout import Stage

SITES = ("site-1", "site-2", "site-3")


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("unsafe", [True, False])
def test_sites_rounds_rewards_epsilon_and_stage_are_shown(is_terminal: bool, unsafe: bool) -> None:
    out = io.StringIO()
    settings = SimulationSettings(sites=3, rounds=2, unsafe_no_dp=unsafe)
    console = Console(file=out, force_terminal=is_terminal, width=120)
    with Terminal(settings, console) as progress:
        progress.stage("measuring every site before training")
        progress.exam_held(Exam(0, "v0", dict.fromkeys(SITES, (0.5, 0.25)), dict.fromkeys(SITES, 0.0)))
        progress.round_ended(
            RoundRecord(1, SITES[:2], (Refusal("site-3", "validate", "norm [60] exceeds"),), "v1", Stage.STABLE)
        )
        progress.exam_held(Exam(1, "v1", dict.fromkeys(SITES, (0.75, 0.75)), dict.fromkeys(SITES, 3.21)))
        progress.round_ended(RoundRecord(2, (), (), None, None, "1 usable update"))
    shown = out.getvalue()
    for text in ("measuring every site", "round 1/2: 2 sites combined, v1 is stable", "norm [60] exceeds", "0.750"):
        assert text in shown
    assert "voided: 1 usable update" in shown
    assert ("NO PRIVACY" in shown) is unsafe
    assert ("epsilon 3.21 of 8" in shown) is not unsafe
    if is_terminal:
        for text in ("site-3", "0.38 → 0.75", "1 of 2 rounds done"):
            assert text in shown
