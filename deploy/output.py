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


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a working folder that becomes `target` when the block ends well, and vanishes otherwise.

    Raises:
        ConfigError: `target` exists, or its disk is read-only or full.
    """
    if target.exists():
        raise ConfigError(f"output folder {target} exists; remove it or choose another with --output")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < _NEEDED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield partial
        partial.replace(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {target}: {error.strerror or type(error).__name__}; "
            "free some space or choose another folder with --output"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
