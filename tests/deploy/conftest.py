"""The `headwater` command inside the test process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from deploy.cli import main


@dataclass
class Run:
    returncode: int
    stdout: str
    stderr: str


Headwater = Callable[..., Run]


@pytest.fixture
def headwater(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Headwater:
    """The command in this process: starting one for every case would take minutes."""

    def run(*arguments: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["headwater", *arguments])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, before)
        captured = capsys.readouterr()
        return Run(int(ended.value.code or 0), captured.out, captured.err)

    return run
