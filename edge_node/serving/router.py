"""Which version answers a request: a stable and a canary arm, sticky per conversation.

The arms are one immutable value; a swap is one assignment, so no request ever
sees half of it. A request keeps the version it was given.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from common.inference.engine import LoadedAdapter

STABLE, CANARY = "stable", "canary"


@dataclass(frozen=True)
class ServedVersion:
    """A version ready to serve."""

    id: str
    adapter: LoadedAdapter


@dataclass(frozen=True)
class Arms:
    """What is served: `canary_share` of conversations go to `canary` while there is one."""

    stable: ServedVersion
    canary: ServedVersion | None = None
    canary_share: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The arm and version one request is pinned to."""

    arm: str
    version: ServedVersion


class Router:
    """Holds the current arms."""

    def __init__(self, arms: Arms) -> None:
        self.arms = arms

    def choose(self, conversation: str) -> Choice:
        """The arm of a conversation: the same one as long as the arms stay."""
        arms = self.arms
        if arms.canary is not None and _position(conversation, arms.canary.id) < arms.canary_share:
            return Choice(CANARY, arms.canary)
        return Choice(STABLE, arms.stable)

    def arm(self, name: str) -> Choice | None:
        """A named arm, or None where it is empty."""
        arms = self.arms
        version = {STABLE: arms.stable, CANARY: arms.canary}.get(name)
        return Choice(name, version) if version is not None else None


def _position(conversation: str, version_id: str) -> float:
    """A conversation's place in [0, 1), drawn anew for every canary so that no user is always first."""
    digest = hashlib.sha256(f"{version_id}\n{conversation}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
