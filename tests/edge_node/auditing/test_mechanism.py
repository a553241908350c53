"""A1 to A3 pass on the code as it is, and each planted bug fails the check that is there for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.accounting import PrivateSteps
from common.errors import PrivacyError
from edge_node.auditing import mechanism as checks
from edge_node.auditing import seeds
from edge_node.auditing.mechanism import AuditedMechanism, noise_floor, sampling, sensitivity
from edge_node.auditing.statement import Check
from edge_node.training.noise import SecureRandom
from edge_node.training.private_step import ClippedSum

VALUES = 20_000
NO_OTHER_PROCESS = "repeated_in_another_process"


def failures(check: Check) -> set[str]:
    return {figure.name for figure in check.figures if not figure.passed}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the second process out: what is planted lives in this one."""
    monkeypatch.setattr(checks, NO_OTHER_PROCESS, lambda: 0)


def test_the_code_as_it_is_passes(mechanism: AuditedMechanism) -> None:
    for check in (
        noise_floor(mechanism, values=VALUES),
        sensitivity(mechanism, values=500),
        sampling(mechanism, units=500, steps=100),
    ):
        assert failures(check) == set(), check.code


@pytest.mark.parametrize(("sigma", "rate", "clip"), [(0.3, 0.01, 1e-3), (10.0, 1.0, 5.0), (40.0, 0.9, 1.0)])
@pytest.mark.usefixtures("here")
def test_other_settings_pass_too(sigma: float, rate: float, clip: float) -> None:
    other = AuditedMechanism(PrivateSteps(sigma, rate, 1), clip, 1e-5)
    assert noise_floor(other, values=VALUES).passed
    assert sensitivity(other, values=500).passed
    assert sampling(other, units=500, steps=100).passed


@pytest.mark.parametrize("factor", [2.0, 1.05, 1 / 1.05])
@pytest.mark.usefixtures("here")
def test_a_wrong_noise_level_fails_a1(
    mechanism: AuditedMechanism, noise_divided_by: Callable[[float], None], factor: float
) -> None:
    noise_divided_by(factor)
    found = failures(noise_floor(mechanism, values=VALUES))
    assert {name for name in found if "deviation" in name or "difference" in name} != set()


@pytest.mark.usefixtures("here")
def test_noise_of_another_shape_fails_a1(mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecureRandom, "normal", lambda self, count: (self.uniform(count) - 0.5) * 12**0.5)
    assert failures(noise_floor(mechanism, values=VALUES)) == {"fit to a Gaussian, p-value"}


@pytest.mark.usefixtures("here")
def test_noise_used_twice_fails_a1(mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = SecureRandom().normal(VALUES)
    monkeypatch.setattr(SecureRandom, "normal", lambda self, count: np.resize(kept, count))
    assert "correlation of two releases" in failures(noise_floor(mechanism, values=VALUES))


@pytest.mark.usefixtures("here")
def test_a_sum_beside_the_lattice_fails_a1(mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ClippedSum.release
    monkeypatch.setattr(ClippedSum, "release", lambda self, random: right(self, random) * (1 + 1e-9))
    assert failures(noise_floor(mechanism, values=VALUES)) == {"numbers off the lattice"}


@pytest.mark.usefixtures("here")
def test_noise_from_a_seed_fails_a1(mechanism: AuditedMechanism, noise_from_a_seed: Callable[[], None]) -> None:
    noise_from_a_seed()
    assert "draws repeated by a seed, in one process" in failures(noise_floor(mechanism, values=VALUES))
    assert seeds.repeated_in_one_process() == 1


def test_the_audit_leaves_no_seed_behind() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    expected = torch.rand(3).tolist(), np.random.random(3).tolist()
    torch.manual_seed(7)
    np.random.seed(7)
    seeds.repeated_in_one_process()
    assert (torch.rand(3).tolist(), np.random.random(3).tolist()) == expected


def test_a_key_that_two_processes_share_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's randomness is replaced in both, as on a machine image that was cloned."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.urandom = lambda count: bytes(count)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))
    assert seeds.repeated_in_another_process() == 2


def test_a_process_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_CHILD", "raise SystemExit(3)")
    with pytest.raises(PrivacyError, match="exit status 3"):
        seeds.repeated_in_another_process()


def test_a_clip_four_times_too_wide_fails_a2(
    mechanism: AuditedMechanism, clip_four_times_too_wide: Callable[[], None]
) -> None:
    clip_four_times_too_wide()
    assert 3.9 < sensitivity(mechanism, values=500).figures[0].value <= 4


def test_a_clip_that_forgets_the_rounding_fails_a2(
    mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coarse lattice: rounding up in every coordinate then adds to the norm."""
    right = ClippedSum.__init__

    def wrong(self: ClippedSum, dimension: int, **named: float) -> None:
        right(self, dimension, **named)
        self.spacing *= 2.0**15
        self._rounded_clip = self.clip_norm

    monkeypatch.setattr(ClippedSum, "__init__", wrong)
    assert not sensitivity(mechanism, values=500).passed


def test_a_value_that_is_not_finite_and_reaches_the_sum_fails_a2(
    mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ClippedSum.add
    monkeypatch.setattr(ClippedSum, "add", lambda self, rows: right(self, torch.nan_to_num(rows, nan=0.0)))
    assert not sensitivity(mechanism, values=500).passed


@pytest.mark.parametrize("alone", [True, False])
def test_a_clip_that_depends_on_the_company_fails_a2(
    mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Wrong for a unit that comes alone, or only for those that come together."""
    right = ClippedSum.add

    def wrong(self: ClippedSum, rows: torch.Tensor) -> None:
        kept = self._rounded_clip
        self._rounded_clip = 4 * kept if (len(rows) == 1) == alone else kept
        right(self, rows)
        self._rounded_clip = kept

    monkeypatch.setattr(ClippedSum, "add", wrong)
    assert not sensitivity(mechanism, values=500).passed


def test_clipping_the_batch_instead_of_the_unit_fails_a2(
    mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ClippedSum.add
    monkeypatch.setattr(ClippedSum, "add", lambda self, rows: right(self, rows * len(rows) / rows.norm() * 1e-6))
    assert not sensitivity(mechanism, values=500).passed


def test_batches_of_fixed_size_fail_a3(mechanism: AuditedMechanism, batches_of_fixed_size: Callable[[], None]) -> None:
    batches_of_fixed_size()
    assert "how much batch sizes vary, against Binomial(N, q), z-score" in failures(
        sampling(mechanism, units=500, steps=100)
    )


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda self, rate, count: self.uniform(count) < rate * 0.9, "share of units"),
        (lambda self, rate, count: np.repeat(self.uniform(-(-count // 2)) < rate, 2)[:count], "two units in one batch"),
        (lambda self, rate, count: np.resize(np.arange(count) % 2 == 0, count), "how often each unit"),
    ],
)
def test_batches_that_are_not_independent_fail_a3(
    mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., np.ndarray], name: str
) -> None:
    monkeypatch.setattr(SecureRandom, "bernoulli", wrong)
    assert any(found.startswith(name) for found in failures(sampling(mechanism, units=500, steps=100)))


def test_batches_that_follow_from_the_last_one_fail_a3(
    mechanism: AuditedMechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shuffled epochs: a unit that was just used is not used again at once."""
    last = np.zeros(0, dtype=bool)

    def wrong(self: SecureRandom, rate: float, count: int) -> np.ndarray:
        nonlocal last
        last = ~last if len(last) == count else self.uniform(count) < rate
        return last

    monkeypatch.setattr(SecureRandom, "bernoulli", wrong)
    assert "one unit in two successive batches, z-score" in failures(sampling(mechanism, units=500, steps=100))


def test_the_scores_of_a_right_sampler_are_standard(mechanism: AuditedMechanism) -> None:
    scores = np.array([[f.value for f in sampling(mechanism, units=300, steps=60).figures[1:]] for _ in range(100)])
    assert np.all(np.abs(scores.mean(axis=0)) < 0.5)
    assert np.all(np.abs(scores.std(axis=0) - 1) < 0.35)
