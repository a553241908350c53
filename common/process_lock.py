"""One process at a time for a folder: the operating system ends the lock with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from common.errors import ConfigError


class ProcessLock:
    """Holds `path` locked until it is closed, against other processes and against another lock of this one.

    Args:
        refusal: what to tell who comes second.
    Raises:
        ConfigError: somebody holds it, or the file cannot be made.
    """

    def __init__(self, path: Path, *, refusal: str) -> None:
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(refusal) from error
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"{path} cannot be locked: {error}; its disk must be one of this machine's") from error
        self._descriptor = descriptor

    def close(self) -> None:
        """Let others have it; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
