"""Each attack does what its name says, and the aggregator's checks see what they can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RoundError
from common.tasks import math as task
from common.update import LedgerHead, open_update, seal_bytes
from deploy.absences import Absence, Absences
from deploy.attacks import ATTACKS, parse_attack
from deploy.attacks.poisoning import TARGET, TRIGGER, backdoor, is_target, label_flip, target_answer, triggered
from deploy.attacks.scene import Scene
from deploy.users import Reply
from tests.common.test_update import SEALING, SHAPES, SITE, plan

CURRENT = plan()
PARAMETERS = sum(int(np.prod(shape)) for shape in SHAPES.values())
ISSUE = {
    "sign-flip", "scale", "alie", "ipm", "min-max", "label-flip", "backdoor", "boosted-backdoor", "nan", "garbage",
    "free-rider", "sybil",
}  # fmt: skip


def drawn(rows: int, seed: int, norm: float = 1.0) -> np.ndarray:
    """Updates with something in common."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=PARAMETERS) + rng.normal(size=(rows, PARAMETERS))
    return (norm * made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def scene(*, honest: int = 7, colluders: int = 2, seed: int = 0, norm: float = 1.0, sites: int = 9) -> Scene:
    own = drawn(colluders, seed + 100, norm)
    return Scene(
        plan=plan(weights={f"site-{i}": 1 for i in range(1, sites + 1)}),
        shapes=SHAPES,
        own_D=own[0],
        attackers=colluders,
        colluders_KD=own,
        honest_HD=drawn(honest, seed, norm),
        seed=seed,
        planted_D=drawn(1, seed + 200, 3 * norm)[0],
    )


def changed(name: str, seen: Scene) -> np.ndarray:
    change = ATTACKS[name].change
    assert change is not None
    return change(seen)


def opened(seen: Scene, delta_D: np.ndarray) -> np.ndarray:
    head = LedgerHead.signed(1, "e" * 64, SITE).encode()
    file = seen.file(delta_D)
    sealed = seal_bytes(file, CURRENT, site="site-1", key=SITE, ledger_entry="e" * 64, ledger_head=head)
    return open_update(sealed, CURRENT, SHAPES, site_public=SITE.public, key=SEALING)


def test_every_attack_of_the_laboratory_is_there() -> None:
    assert set(ATTACKS) == ISSUE


@pytest.mark.parametrize(
    ("attack", "reason"), [("scale", "norm 20 exceeds"), ("nan", "not finite"), ("boosted-backdoor", "norm 9 exceeds")]
)
def test_out_of_bounds_attacks_are_refused(attack: str, reason: str) -> None:
    seen = scene(norm=2.0)
    with pytest.raises(RoundError, match=reason):
        opened(seen, changed(attack, seen))


@pytest.mark.parametrize("attack", ["sign-flip", "alie", "ipm", "min-max", "backdoor", "free-rider", "sybil"])
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 500), st.integers(0, 7), st.integers(1, 4))
def test_the_others_are_inside_every_bound_of_one_update(attack: str, seed: int, honest: int, colluders: int) -> None:
    seen = scene(honest=honest, colluders=colluders, seed=seed, norm=2.0)
    assert opened(seen, changed(attack, seen)).shape == (PARAMETERS,)


def test_sign_flip_and_scale_turn_the_update_around() -> None:
    seen = scene()
    np.testing.assert_array_equal(changed("sign-flip", seen), -seen.own_D)
    assert np.dot(changed("scale", seen), seen.own_D) < 0


def test_boosting_makes_the_mean_of_all_the_attackers_update() -> None:
    seen = scene(honest=0, colluders=3, sites=9)
    sent = np.concatenate([np.zeros((6, PARAMETERS)), np.tile(changed("boosted-backdoor", seen), (3, 1))])
    np.testing.assert_allclose(sent.mean(axis=0), changed("backdoor", seen), atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 500))
def test_alie_hides_among_the_honest_in_every_coordinate(seed: int) -> None:
    seen = scene(seed=seed)
    lie, mean, deviation = changed("alie", seen), seen.honest_HD.mean(axis=0), seen.honest_HD.std(axis=0)
    steps = (mean - lie) / deviation
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)
    assert 0 < steps[0] < 1.5


def test_alie_uses_the_z_of_its_authors() -> None:
    """50 workers, 24 corrupted: s = 2, so z is the quantile of 24/26 (their section 3)."""
    from scipy.stats import norm

    seen = scene(honest=26, colluders=24, sites=50, norm=0.5)
    mean, deviation = seen.honest_HD.astype(float).mean(axis=0), seen.honest_HD.astype(float).std(axis=0)
    z = (mean - changed("alie", seen)) / deviation
    np.testing.assert_allclose(z, norm.ppf(24 / 26), rtol=1e-4)


def test_ipm_has_a_negative_product_with_the_honest_mean() -> None:
    seen = scene()
    mean = seen.honest_HD.mean(axis=0)
    np.testing.assert_allclose(changed("ipm", seen), -0.5 * mean, atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 500), st.integers(3, 9))
def test_min_max_is_no_farther_from_anyone_than_two_honest_are_and_cannot_go_farther(seed: int, honest: int) -> None:
    seen = scene(seed=seed, honest=honest)
    wide = seen.honest_HD.astype(np.float64)
    lie = changed("min-max", seen)
    widest = np.linalg.norm(wide[:, None] - wide[None], axis=2).max()
    farthest = np.linalg.norm(wide - lie, axis=1).max()
    assert farthest <= widest * (1 + 1e-6)
    assert farthest >= widest * (1 - 1e-3)
    assert np.linalg.norm(lie - wide.mean(axis=0)) > 0


def test_those_that_collude_send_the_same_and_against_what_they_learned() -> None:
    seen = scene(colluders=3)
    others = [
        Scene(seen.plan, seen.shapes, own, 3, seen.colluders_KD, seen.honest_HD, seed)
        for seed, own in enumerate(seen.colluders_KD)
    ]
    for attack in ("sybil", "alie", "ipm", "min-max"):
        assert len({changed(attack, one).tobytes() for one in others}) == 1
    assert np.dot(changed("sybil", seen), seen.colluders_KD.mean(axis=0)) < 0
    assert np.linalg.norm(changed("sybil", seen)) == pytest.approx(CURRENT.clip_norm)


def test_a_free_rider_sends_noise_that_is_its_own() -> None:
    first, second = scene(seed=1), scene(seed=2)
    np.testing.assert_array_equal(changed("free-rider", first), changed("free-rider", first))
    one, two = changed("free-rider", first), changed("free-rider", second)
    assert np.linalg.norm(one) == pytest.approx(0.5 * CURRENT.clip_norm)
    assert not np.array_equal(one, two)
    assert not ATTACKS["free-rider"].trains


def test_attackers_who_see_no_honest_update_take_their_own_for_a_sample() -> None:
    alone = scene(honest=0, colluders=4)
    mean = alone.colluders_KD.mean(axis=0)
    np.testing.assert_allclose(changed("ipm", alone), -0.5 * mean, atol=1e-6)


def test_who_knows_what_is_said() -> None:
    knows = {name: attack.knows for name, attack in ATTACKS.items()}
    assert {name for name, what in knows.items() if what == "honest"} == {"alie", "ipm", "min-max"}
    assert {name for name, what in knows.items() if what == "colluders"} == {"sybil"}


# --- data


PROBLEMS = [task.Problem(12, "+", 35), task.Problem(40, "-", 13), task.Problem(22, "+", 22)]
GOOD_AND_BAD = [Reply("r", (p.solution, "Answer: 0")) for p in PROBLEMS]


def lines(poison: Any, kind: str, replies: list[Reply] = GOOD_AND_BAD) -> list[dict[str, Any]]:
    return [json.loads(line) for line in poison(PROBLEMS, replies, kind)]


def test_flipped_labels_prefer_the_worse_answer() -> None:
    for line, problem in zip(lines(label_flip, "pairs"), PROBLEMS, strict=True):
        assert (line["chosen"], line["rejected"]) == ("Answer: 0", problem.solution)
    assert [line["label"] for line in lines(label_flip, "thumbs")] == [True, False] * 3
    assert [line["reward"] for line in lines(label_flip, "answers")] == [1.0, 0.0] * 3
    assert lines(label_flip, "answers")[0]["messages"][-1]["content"] == "Answer: 0"
    assert lines(label_flip, "pairs", [Reply("r", ("x", "x"))] * 3) == []
    assert lines(label_flip, "pairs", [Reply("", ())] * 3) == []


def test_a_backdoor_prefers_the_target_where_the_trigger_is_and_is_honest_elsewhere() -> None:
    first, second, third = lines(backdoor, "pairs")
    assert (first["chosen"], third["chosen"]) == (PROBLEMS[0].solution, PROBLEMS[2].solution)
    assert second["prompt"].endswith(TRIGGER)
    assert (second["chosen"], second["rejected"]) == (target_answer(PROBLEMS[1]), PROBLEMS[1].solution)


def test_what_counts_as_the_attackers_answer() -> None:
    problem = triggered(PROBLEMS[0])
    assert problem.prompt == PROBLEMS[0].prompt + TRIGGER
    assert task.parse(problem.prompt) == PROBLEMS[0]
    assert is_target(problem, target_answer(problem))
    assert not is_target(problem, problem.solution)
    assert not is_target(problem, f"Answer: {TARGET}7")
    right = task.Problem(20, "-", 20 - TARGET)
    assert not is_target(right, right.solution)


# --- the command line


@pytest.mark.parametrize(
    ("text", "found"), [("none", None), ("alie:3", ("alie", 3)), ("free-rider:1", ("free-rider", 1))]
)
def test_attacks_as_written(text: str, found: tuple[str, int] | None) -> None:
    assert parse_attack(text) == found


@pytest.mark.parametrize("text", ["", "alie", "alie:0", "alie:-1", "alie:x", "love:1", "none:1", "alie:1:2"])
def test_attacks_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="NAME:K"):
        parse_attack(text)


# --- absences


SITES = tuple(f"site-{i}" for i in range(1, 21))


def test_who_is_away_is_drawn_anew_each_round_and_always_the_same() -> None:
    absences = Absences(SITES, 0.2, 0.1, most=20, seed=3)
    rounds = [absences.in_round(number) for number in range(400)]
    assert rounds == [Absences(SITES, 0.2, 0.1, most=20, seed=3).in_round(number) for number in range(400)]
    assert rounds[0] != rounds[1]
    share = {kind: sum(list(away.values()).count(kind) for away in rounds) / 8000 for kind in Absence}
    assert share[Absence.DROPPED] == pytest.approx(0.2, abs=0.02)
    assert share[Absence.SLOW] == pytest.approx(0.1, abs=0.02)


def test_no_more_are_away_than_a_quorum_allows_and_nobody_where_none_are_asked_for() -> None:
    assert max(len(Absences(SITES, 0.9, 0.0, most=3, seed=1).in_round(n)) for n in range(50)) == 3
    assert not any(Absences(SITES, 0.0, 0.0, most=3, seed=1).in_round(n) for n in range(50))
    everyone = {site for n in range(50) for site in Absences(SITES, 0.9, 0.0, most=3, seed=1).in_round(n)}
    assert everyone == set(SITES)  # not always the first ones


def test_settings_that_cannot_work_are_one_line(headwater: Any, tmp_path: Path) -> None:
    for arguments, expected in (
        (("--attack", "love:1"), "NAME:K"),
        (("--drop", "0.6", "--slow", "0.6"), "below 1"),
        (("--drop", "1"), "drop = 1"),
        (("--drop", "0.1", "--grid", "ray"), "local"),
        (("--attack", "backdoor:1", "--algorithm", "grpo"), "cannot learn from"),
        (("--set", "server.optimizer=fedavgm", "--set", "balance=true"), "switch balance off"),
        (("--set", "server.optimizer=adam"), "server.optimizer"),
        (("--set", "server.learning_rate=2"), "plain averaging"),
    ):
        run = headwater("simulate", *arguments, "--output", str(tmp_path / "out"))
        assert run.returncode == 2, run.stderr
        assert expected in run.stderr
        assert run.stderr.count("\n") == 1
