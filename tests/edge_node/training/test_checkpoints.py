"""Checkpoints survive crashes, damage and strangers' files, and are found only under their own reservation."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, TransportError, TrustError
from common.plan import RoundPlan, Training
from edge_node.training.checkpoints import Checkpoint, Checkpoints, TrainingRecord

ENTRY, OTHER_ENTRY = "1" * 64, "2" * 64
PLAN = RoundPlan(
    federation="f",
    round=3,
    planned_rounds=5,
    base_digest="b" * 64,
    adapter_version="v2",
    adapter_digest="a" * 64,
    training=Training("dpo", "adam", 0.1, 500, 0.5, 100.0, 0.1, {"beta": 0.1}),
    lora_phase="B",
    clip_norm=2.0,
    weights={"site-1": 1, "site-2": 2},
    roster_digest="c" * 64,
    sealing_key="d" * 64,
    deadline_s=1e9,
)
RECORD = TrainingRecord(
    plan=dataclasses.asdict(PLAN),
    plan_digest=PLAN.digest,
    ledger_entry=ENTRY,
    noise_multiplier=1.2345678901234567,
    unit="user",
    data_after_s=0.1,
    data_until_s=1.7e9 + 0.3,
    precision="bfloat16",
    libraries={"torch": "2.9", "peft": "0.18"},
)


def checkpoint(step: int, *, entry: str = ENTRY, plan: str = PLAN.digest) -> Checkpoint:
    rng = np.random.default_rng(step)
    tensors = {
        "x.lora_B.weight": rng.normal(size=(4, 2)).astype(np.float32),
        "x.lora_B.weight/exp_avg": rng.normal(size=(4, 2)).astype(np.float32),
        "x.lora_B.weight/step": np.array(float(step), np.float32),
    }
    return Checkpoint(step, dataclasses.replace(RECORD, ledger_entry=entry, plan_digest=plan), tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Checkpoints:
    kept = Checkpoints(folder)
    for step in (100, 200, 300):
        kept.save(checkpoint(step))
    return kept


def file_of(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"{PLAN.digest}/step-*{step}.safetensors")
    return found


def test_everything_comes_back_as_it_was(checkpoints: Checkpoints, folder: Path) -> None:
    again = Checkpoints(folder)
    assert again.plans() == [PLAN.digest]
    assert again.steps(PLAN.digest) == [100, 200, 300]
    for step in (100, 200, 300):
        found, saved = again.read(PLAN.digest, step), checkpoint(step)
        assert found is not None
        assert (found.step, found.record) == (step, saved.record)
        assert found.tensors.keys() == saved.tensors.keys()
        for name, tensor in saved.tensors.items():
            np.testing.assert_array_equal(found.tensors[name], tensor)
            assert found.tensors[name].dtype == tensor.dtype
            assert found.tensors[name].shape == tensor.shape
        assert RoundPlan(**{**found.record.plan, "training": Training(**found.record.plan["training"])}) == PLAN


def test_only_the_owner_can_read_them(checkpoints: Checkpoints, folder: Path) -> None:
    for path in (folder, folder / PLAN.digest):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (folder / PLAN.digest).iterdir()} == {0o600}


def test_a_step_that_is_saved_again_replaces_the_file(checkpoints: Checkpoints, folder: Path) -> None:
    """Steps after the checkpoint that training goes on from are run again."""
    newer = checkpoint(200)
    newer = dataclasses.replace(newer, tensors={name: np.asarray(tensor + 1) for name, tensor in newer.tensors.items()})
    checkpoints.save(newer)
    found = checkpoints.read(PLAN.digest, 200)
    assert found is not None
    np.testing.assert_array_equal(found.tensors["x.lora_B.weight"], newer.tensors["x.lora_B.weight"])
    assert len(list((folder / PLAN.digest).iterdir())) == 3


def test_the_latest_is_the_newest_under_the_reservation_that_pays(checkpoints: Checkpoints) -> None:
    checkpoints.save(checkpoint(250, entry=OTHER_ENTRY))
    for entry, expected in ((ENTRY, 300), (OTHER_ENTRY, 250)):
        found = checkpoints.latest(PLAN.digest, ledger_entry=entry)
        assert found is not None
        assert found.step == expected
    assert checkpoints.latest(PLAN.digest, ledger_entry="3" * 64) is None
    assert checkpoints.latest("f" * 64, ledger_entry=ENTRY) is None


@given(cut=st.floats(0, 0.999))
def test_of_a_damaged_file_an_earlier_one_will_do(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(folder)
    for step in (100, 200):
        checkpoints.save(checkpoint(step))
    whole = file_of(folder, 200).read_bytes()
    file_of(folder, 200).write_bytes(whole[: int(cut * len(whole))])
    assert checkpoints.read(PLAN.digest, 200) is None
    found = checkpoints.latest(PLAN.digest, ledger_entry=ENTRY)
    assert found is not None
    assert found.step == 100


def test_a_file_of_another_format_is_not_a_checkpoint(checkpoints: Checkpoints, folder: Path) -> None:
    from safetensors.numpy import save

    tensors = dict(checkpoint(300).tensors)
    for content in (
        save(tensors),
        save(tensors, metadata={"step": "300"}),
        save(tensors, metadata={"record": "{}"}),
        save(tensors, metadata={"record": "[1]"}),
        save(tensors, metadata={"record": "not json"}),
        b"",
        b"\x80\x04pickle",
    ):
        file_of(folder, 300).write_bytes(content)
        assert checkpoints.read(PLAN.digest, 300) is None
    file_of(folder, 300).unlink()
    assert checkpoints.read(PLAN.digest, 300) is None


def test_going_back_deletes_what_came_after_and_nothing_else(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(checkpoint(400, plan="e" * 64))
    for missing in (0, 150, 301):
        with pytest.raises(ConfigError, match=rf"no checkpoint at step {missing}; there are \[100, 200, 300\]"):
            checkpoints.rewind(PLAN.digest, step=missing)
    assert checkpoints.steps(PLAN.digest) == [100, 200, 300]
    checkpoints.rewind(PLAN.digest, step=300)
    assert checkpoints.steps(PLAN.digest) == [100, 200, 300]
    checkpoints.rewind(PLAN.digest, step=100)
    assert checkpoints.steps(PLAN.digest) == [100]
    assert checkpoints.steps("e" * 64) == [400]
    with pytest.raises(ConfigError, match="there are none"):
        checkpoints.rewind("f" * 64, step=100)


def test_a_finished_round_has_none_and_others_keep_theirs(checkpoints: Checkpoints) -> None:
    checkpoints.save(checkpoint(100, plan="e" * 64))
    for _ in range(2):
        checkpoints.remove(PLAN.digest)
        assert checkpoints.steps(PLAN.digest) == []
        assert checkpoints.plans() == ["e" * 64]


def test_a_rounds_key_is_made_once_and_goes_with_the_round(checkpoints: Checkpoints, folder: Path) -> None:
    assert not checkpoints.has_key(PLAN.digest)
    key, other = checkpoints.key(PLAN.digest), checkpoints.key("e" * 64)
    assert len(key) == 32
    assert key != other
    assert checkpoints.has_key(PLAN.digest)
    assert Checkpoints(folder).key(PLAN.digest) == key
    checkpoints.rewind(PLAN.digest, step=100)
    assert checkpoints.key(PLAN.digest) == key
    assert checkpoints.plans() == sorted([PLAN.digest, "e" * 64])  # begun, though without a checkpoint
    checkpoints.remove(PLAN.digest)
    assert not checkpoints.has_key(PLAN.digest)
    assert not (folder / PLAN.digest).exists()
    assert checkpoints.key(PLAN.digest) != key
    assert checkpoints.key("e" * 64) == other


def test_a_key_that_others_could_read_is_not_used(checkpoints: Checkpoints, folder: Path) -> None:
    key = checkpoints.key(PLAN.digest)
    (file,) = (file for file in (folder / PLAN.digest).iterdir() if file.read_bytes() == key)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(TrustError):
        checkpoints.key(PLAN.digest)


def test_a_round_keeps_the_window_it_was_begun_with(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.key(PLAN.digest)
    assert checkpoints.window(PLAN.digest, (0.1, 1.7e9 + 0.3)) == (0.1, 1.7e9 + 0.3)
    assert checkpoints.window(PLAN.digest, (5.0, 2e9)) == (0.1, 1.7e9 + 0.3)  # records that came later stay out
    file = folder / PLAN.digest / "round.window"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for damaged in ("", "[1.0]", "[1.0, null]", "{}", "\x00"):
        file.write_text(damaged)
        with pytest.raises(TrustError, match="damaged"):
            checkpoints.window(PLAN.digest, (5.0, 2e9))


def test_strange_files_are_passed_over(checkpoints: Checkpoints, folder: Path) -> None:
    (folder / "lost+found").mkdir()
    (folder / ("F" * 64)).mkdir()
    (folder / PLAN.digest / "notes.txt").write_text("x")
    (folder / PLAN.digest / "partial-400").write_bytes(b"half")
    assert checkpoints.plans() == [PLAN.digest]
    assert checkpoints.steps(PLAN.digest) == [100, 200, 300]
    checkpoints.save(checkpoint(400))  # also over what a killed process left
    assert checkpoints.steps(PLAN.digest) == [100, 200, 300, 400]
    assert not (folder / PLAN.digest / "partial-400").exists()


@pytest.mark.parametrize("digest", ["", "..", "../../keys", "a" * 63, "A" * 64, f"{'a' * 64}/..", f"{'a' * 64}\n"])
def test_a_name_that_is_no_digest_reaches_no_folder(checkpoints: Checkpoints, digest: str) -> None:
    for attempt in (
        lambda: checkpoints.remove(digest),
        lambda: checkpoints.steps(digest),
        lambda: checkpoints.key(digest),
        lambda: checkpoints.rewind(digest, step=100),
        lambda: checkpoints.save(checkpoint(1, plan=digest)),
    ):
        with pytest.raises(ValueError, match="64 hexadecimal"):
            attempt()
    assert checkpoints.read(digest, 100) is None
    assert checkpoints.steps(PLAN.digest) == [100, 200, 300]


def test_a_disk_that_does_not_take_one_says_so_and_keeps_the_others(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(TransportError, match=r"step 400 could not be stored: .*No space left"):
            checkpoints.save(checkpoint(400))
    assert sorted(file.name for file in (folder / PLAN.digest).iterdir()) == [
        f"step-000{step}.safetensors" for step in (100, 200, 300)
    ]
    (folder / ("9" * 64)).write_text("a file where a folder should be")
    with pytest.raises(TransportError):
        checkpoints.save(checkpoint(1, plan="9" * 64))
