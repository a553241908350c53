"""An output folder that exists whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError

_NEEDED_BYTES = 256 * 2**20
_DISK_ERRORS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.ENOENT,
        errno.ENAMETOOLONG,
        errno.EIO,
    }
)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a working folder that becomes `target` when the block ends well, and vanishes otherwise.

    Raises:
        ConfigError: `target` exists, or its disk is read-only or full.
    """
    if not target.name or target.name == "..":
        raise ConfigError(f"output folder {str(target)!r} has no name of its own; give another with --output")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    created: list[Path] = []
    finished = False
    try:
        if os.path.lexists(target):
            raise ConfigError(f"output folder {target} exists; remove it or choose another with --output")
        created = [folder for folder in partial.parents if not folder.exists()]
        partial.mkdir(parents=True)
        if shutil.disk_usage(partial).free < _NEEDED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield partial
        partial.replace(target)
        finished = True
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise ConfigError(
            f"cannot write to {target}: {error.strerror}; free some space or choose another folder with --output"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not finished:
            _remove_empty(created)


def _remove_empty(folders: list[Path]) -> None:
    """Remove the parents that were made for nothing, innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
