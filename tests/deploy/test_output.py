from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from common.errors import ConfigError
from deploy.output import whole_folder


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "a"
    with whole_folder(target) as folder:
        (folder / "report.json").write_text("{}")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["report.json"]
    assert [p.name for p in target.parent.iterdir()] == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_a_disk_that_fills_up_leaves_nothing_and_one_line(tmp_path: Path, code: int) -> None:
    with pytest.raises(ConfigError, match="cannot write to"), whole_folder(tmp_path / "deep" / "a") as folder:
        (folder / "half").write_text("x")
        raise OSError(code, os.strerror(code))
    assert list(tmp_path.iterdir()) == []


def test_another_error_keeps_its_name_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), whole_folder(tmp_path / "a"):
        raise ConnectionResetError
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "a"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="No space left"), whole_folder(tmp_path / "a"):
        pytest.fail("the block ran")
    assert list(tmp_path.iterdir()) == []
