"""The site's own law: `policy.toml`, separate from `edge.toml`, owned by the site.

It alone decides what is redacted, how much privacy may be spent and what may be
uploaded; nothing the vendor sends can loosen it. Fail closed: missing, unreadable,
invalid or writable by others means the node serves, and neither collects nor
trains nor uploads. The file is looked at again before every use, so deleting it
stops a running node.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.config import explain
from common.errors import PrivacyError

BUILT_IN_PATTERNS = {"email": r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"}
"""Always applied; bounded, so that no text makes them slow."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Privacy(_Section):
    """The guarantee every upload keeps; no defaults, a privacy officer writes them down.

    Attributes:
        unit: what may be added or removed: one trajectory, or one end user with all of theirs.
        examples_per_user: how many of a user's examples a round may use, where the unit is the user.
    """

    unit: Literal["trajectory", "user"]
    epsilon_total: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    examples_per_user: Annotated[int, Field(ge=1, le=1000)] = 4


class Collection(_Section):
    """What may be stored at the site, and for how long."""

    enabled: bool = True
    retention_days: Annotated[int, Field(ge=1)] = 30


class Redaction(_Section):
    """What is replaced before anything is written.

    Attributes:
        fields: names whose value is removed wherever one is assigned, also as part of a longer name.
        patterns: further regular expressions by name, beside BUILT_IN_PATTERNS.
    """

    fields: tuple[Annotated[str, Field(min_length=1)], ...] = ("password", "token")
    patterns: dict[str, str] = {}

    @property
    def all_patterns(self) -> dict[str, str]:
        return {**BUILT_IN_PATTERNS, **self.patterns}

    @model_validator(mode="after")
    def _usable(self) -> Redaction:
        names = [*self.fields, *self.patterns, *BUILT_IN_PATTERNS]
        clashes = sorted(name for name in set(names) if names.count(name) > 1)
        if clashes:
            raise ValueError(f"{clashes[0]} names two redaction rules; give each a name of its own")
        for name, pattern in self.patterns.items():
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"redaction pattern {name} is not a usable regular expression") from error
        return self


class Upload(_Section):
    """What may leave the site: sealed private updates, and in which aggregation modes.

    Attributes:
        word_bits: of one masked number in mode `secagg`; every site and the aggregator must say the same.
    """

    updates: bool
    aggregation: tuple[Literal["sealed", "secagg", "secagg_sketch"], ...]
    word_bits: Literal[16, 32] = 32


class RosterSite(_Section):
    """A site that this one agrees to be summed with, as its people have checked it.

    Attributes:
        key: hex of its Ed25519 public key, compared over another channel.
        organisation: who runs it; secure aggregation counts organisations.
        run_by_vendor: whether that is whoever runs the aggregator.
    """

    name: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    organisation: Annotated[str, Field(min_length=1)]
    weight: Literal[1, 2, 4] = 1
    run_by_vendor: bool = False


class Choosing(_Section):
    """How far the aggregator may choose over secure rounds; see `common.secagg.context.Limits`."""

    distinct_sets: Annotated[int, Field(ge=1)] = 3
    window: Annotated[int, Field(ge=1)] = 10
    left_out: Annotated[int, Field(ge=0)] = 3
    sketched_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    directions: Annotated[int, Field(ge=0, le=1)] = 0


class SitePolicy(_Section):
    """A valid policy."""

    privacy: Privacy
    upload: Upload
    collection: Collection = Collection()
    redaction: Redaction = Redaction()
    choosing: Choosing = Choosing()
    roster: tuple[RosterSite, ...] = ()


@dataclass(frozen=True)
class ServeOnly:
    """There is no valid policy, and why."""

    reason: str


def read_policy(path: Path) -> SitePolicy | ServeOnly:
    """Read and check the file; never raises for what is in it."""
    try:
        found = path.stat()
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ServeOnly(f"{path.name} is missing")
    except (OSError, UnicodeDecodeError) as error:
        return ServeOnly(f"{path.name} cannot be read: {type(error).__name__}")
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()):
        return ServeOnly(f"{path.name} belongs to another user; it must be this node's or root's")
    if mode & 0o022:
        return ServeOnly(f"{path.name} has mode {mode:04o}, others could change it; run: chmod 644 {path.name}")
    try:
        return SitePolicy.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        return ServeOnly(f"{path.name} is not TOML: {error}")
    except ValidationError as error:
        return ServeOnly(f"{path.name}: {explain(error, SitePolicy)}")
    except (ValueError, OverflowError, RecursionError) as error:
        return ServeOnly(f"{path.name} cannot be read: {type(error).__name__}")


class PolicyFile:
    """The policy as it is on disk now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._current: SitePolicy | ServeOnly = ServeOnly(f"{path.name} was not read yet")

    def current(self) -> SitePolicy | ServeOnly:
        """The policy in force; re-read where the file changed."""
        try:
            found = self._path.stat()
            version = (found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid)
        except OSError:
            version = None
        if version is None or version != self._seen:
            self._current = read_policy(self._path)
            self._seen = version
        return self._current

    def law(self) -> SitePolicy:
        """The policy, or PrivacyError where the node may only serve."""
        policy = self.current()
        if isinstance(policy, ServeOnly):
            raise PrivacyError(
                f"this node only serves: {policy.reason}", public="this site has no valid policy and only serves"
            )
        return policy
