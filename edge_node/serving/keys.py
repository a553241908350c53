"""Bearer keys of the API: only their hashes are on disk, each with what it may do.

A key has 256 random bits, so its plain SHA-256 tells nothing. The file is read again
when it changes: a key that was revoked stops working at once. As long as there is no
file, callers on this machine need no key; once there was one, a file that is gone or
unreadable lets nobody in.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError, TrustError
from common.identity import read_private, write_private
from common.telemetry import log_event
from edge_node.config import EdgeConfig
from edge_node.serving.errors import PERMISSION, ApiError
from edge_node.serving.exchange import LOCAL_KEY

logger = logging.getLogger("headwater.edge")

CHAT, FEEDBACK, METRICS = "chat", "feedback", "metrics"
SCOPES = {
    CHAT: "ask: /v1/chat/completions, /v1/completions, /v1/models",
    FEEDBACK: "say how good answers were, and commit them: /feedback, /commit",
    METRICS: "look at the node: /metrics, /probe",
}
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PREFIX = "hw-"


@dataclass(frozen=True)
class Caller:
    """Who asks, and what they may do."""

    id: str
    scopes: frozenset[str]


LOCAL = Caller(LOCAL_KEY, frozenset(SCOPES))
"""A caller on this machine where no keys are set up."""


class ApiKey(BaseModel):
    """A key as it is on disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=_ID.pattern + "$")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    scopes: tuple[str, ...]
    created_s: float


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[ApiKey, ...]


class KeyRing:
    """The keys in one file.

    Raises:
        TrustError: the file is there and others can read it, or it holds no keys of this form.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._keys: tuple[ApiKey, ...] | None = None
        if path.exists():
            self._seen = self._version()
            self._keys = self._read()

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """Every key there is; none where no key was ever made."""
        return self._read() if self._path.exists() else ()

    @property
    def in_use(self) -> bool:
        """Whether callers need a key."""
        return self._keys is not None or self._path.exists()

    def caller(self, bearer: str | None) -> Caller | None:
        """Who has this key; None for nobody."""
        self._look_again()
        if self._keys is None:
            return LOCAL
        digest = hashlib.sha256((bearer or "").encode(errors="surrogateescape")).hexdigest()
        found = None
        for key in self._keys:  # all of them, so that the time tells nothing about which
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return Caller(found.id, frozenset(found.scopes)) if found is not None and bearer else None

    def add(self, id_: str, scopes: Sequence[str], *, now_s: float) -> str:
        """Make a key; it is told once and cannot be shown again.

        Raises:
            ConfigError: there is one of this name, or an unknown scope.
        """
        if not _ID.fullmatch(id_) or id_ == LOCAL_KEY:
            raise ConfigError(f"{id_!r} is no name for a key: lower-case letters, digits and hyphens, at most 63")
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown or not scopes:
            raise ConfigError(f"scopes are {', '.join(SCOPES)}; {unknown[0] if unknown else 'none'} was asked for")
        if any(key.id == id_ for key in self.keys):
            raise ConfigError(f"there is a key named {id_!r} already; revoke it first")
        secret = _PREFIX + secrets.token_urlsafe(32)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        made = ApiKey(id=id_, sha256=digest, scopes=tuple(sorted(set(scopes))), created_s=now_s)
        self._write((*self.keys, made))
        return secret

    def revoke(self, id_: str) -> None:
        """Forget a key; raises ConfigError where there is none of this name."""
        left = tuple(key for key in self.keys if key.id != id_)
        if len(left) == len(self.keys):
            raise ConfigError(f"there is no key named {id_!r}")
        self._write(left)

    def _write(self, keys: tuple[ApiKey, ...]) -> None:
        partial = self._path.with_name(f".{self._path.name}.new")
        partial.unlink(missing_ok=True)
        write_private(partial, _KeyFile(keys=keys).model_dump_json(indent=1).encode())
        partial.replace(self._path)

    def _look_again(self) -> None:
        version = self._version()
        if version == self._seen:
            return
        self._seen = version
        try:
            self._keys = self._read()
        except (TrustError, OSError) as error:
            log_event(logger, "API keys refused", error=type(error).__name__, reason=str(error))
            self._keys = ()

    def _version(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode

    def _read(self) -> tuple[ApiKey, ...]:
        try:
            return _KeyFile.model_validate(json.loads(read_private(self._path))).keys
        except (ValueError, ValidationError, RecursionError) as error:
            raise TrustError(f"{self._path} holds no API keys; restore it, or remove it and make new keys") from error


def key_file(data_dir: Path) -> Path:
    return data_dir / "keys" / "api_keys.json"


def open_keys(config: EdgeConfig) -> KeyRing:
    """The keys of a node.

    Raises:
        ConfigError: others can reach the node, and there are no keys.
        TrustError: the keys' file does not hold.
    """
    keys = KeyRing(key_file(config.data_dir))
    if not config.on_loopback and not keys.in_use:
        raise ConfigError(
            f"host {config.host} lets others in, and there are no API keys; "
            "make one first: headwater edge key add NAME, or leave host on 127.0.0.1"
        )
    return keys


def require(scope: str) -> Callable[[Request], Caller]:
    """A dependency: the caller, if their key may do this."""

    def allowed(request: Request) -> Caller:
        caller: Caller = request.state.caller
        if scope not in caller.scopes:
            raise ApiError(403, f"this key has no scope {scope!r}", code="insufficient_permissions", kind=PERMISSION)
        return caller

    return allowed


def bearer_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The key a request carries, if it carries one."""
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
