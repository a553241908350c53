"""Bad input on the command line: one clear line, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.inference.model_folder import EMBEDDED
from tests.deploy.conftest import Headwater


def foreign_model(tmp_path: Path) -> str:
    folder = Path(shutil.copytree(EMBEDDED, tmp_path / "foreign"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "trainig.steps=3"], "unknown key 'trainig'; did you mean 'training'?"),
        (["--set", "training.setps=3"], "did you mean 'steps'?"),
        (["--set", "training.steps"], "not key=value"),
        (["--set", "lora.alpha=inf"], "lora.alpha"),
        (["--set", "sites=6\nrounds=3"], "sites"),
        (["--epsilon", "0"], "epsilon = 0.0: Input should be greater than 0"),
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "nan"], "epsilon"),
        (["--epsilon", "0.0001"], "raise epsilon or plan fewer rounds"),
        (["--sites", "2"], "at least 3 sites, got 2"),
        (["--sites", "5", "--rule", "nnm-trimmed-mean"], "needs at least 6 sites, got 5"),
        (["--sites", "0"], "sites = 0"),
        (["--rounds", "0"], "rounds = 0"),
        (["--rule", "average"], "known rules: centred-clipping, dnc,"),
        (["--algorithm", "sft"], "dpo"),
        (["--attack", "scale"], "NAME:K"),
        (["--attack", "scale:0"], "NAME:K"),
        (["--attack", "tickle:1"], "sign-flip"),
        (["--sites", "3", "--attack", "scale:3"], "at least one must be honest"),
        (["--grid", "cloud"], "grid"),
        (["--model", "/nowhere/at/all"], "does not exist"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(
    headwater: Headwater, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    run = headwater("simulate", *arguments, "--output", str(tmp_path / "out"))
    assert run.returncode == 2, run.stderr
    assert expected in run.stderr
    assert run.stderr.startswith("headwater: ")
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokenizer_config.json", "[]"), ("chat_template.jinja", None), ("tokenizer.json", "x")],
)
def test_a_tokenizer_that_cannot_be_used_is_one_line(
    headwater: Headwater, tmp_path: Path, name: str, content: str | None
) -> None:
    folder = Path(shutil.copytree(EMBEDDED, tmp_path / "model"))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    run = headwater("simulate", "--model", str(folder), "--output", str(tmp_path / "out"))
    assert run.returncode == 2
    assert "tokenizer" in run.stderr
    assert run.stderr.strip().count("\n") == 0
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_unsupported_architecture_is_named(headwater: Headwater, tmp_path: Path) -> None:
    run = headwater("simulate", "--model", foreign_model(tmp_path), "--output", str(tmp_path / "out"))
    assert run.returncode == 2
    assert "GPT2LMHeadModel" in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("file/out", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("existing", "exists"),
        ("dangling", "exists"),
        ("/proc/out", "cannot write"),
        ("/", "has no name"),
        ("", "exists"),
        ("..", "has no name"),
    ],
)
def test_an_output_folder_that_cannot_be_written_is_one_line(
    headwater: Headwater, tmp_path: Path, output: str, expected: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "existing").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    run = headwater("simulate", "--output", str(tmp_path / output))
    assert run.returncode == 2
    assert expected in run.stderr
    assert run.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_settings_come_from_file_environment_and_flags(
    headwater: Headwater, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text("sites = 2\n")
    run = headwater("simulate", "--config", str(tmp_path / "a.toml"), "--output", str(tmp_path / "out"))
    assert "got 2" in run.stderr
    monkeypatch.setenv("HEADWATER__SITES", "1")
    run = headwater("simulate", "--output", str(tmp_path / "out"))
    assert "got 1" in run.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "simulate", "--sites", "3", "--output", str(tmp_path / "deep" / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("deep/.out.partial*/sites/*/data/trajectories")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_says_its_version_and_ends_in_code_two(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("headwater")
    shown = subprocess.run([command, "version"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout.strip() == "0.1.0"
    refused = subprocess.run([command, "simulate", "--sites", "1"], capture_output=True, text=True, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "headwater: rule mean needs at least 3 sites, got 1; add sites or take another rule\n"
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_hides_ours_is_named(tmp_path: Path) -> None:
    shutil.copytree("common", tmp_path / "common")
    run = subprocess.run(
        [sys.executable, "-c", "from deploy.cli import main; main()", "version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 2
    assert "'common' is hidden by" in run.stderr
