"""Which version answers a request: stable, canary or a variant, sticky per conversation.

What is served is one immutable value; a swap is one assignment, so no request ever
sees half of it. A request keeps the version it was given. The last versions stay in
memory and can be named, so that going back needs no loading.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from common.adapter import Adapter

STABLE, CANARY, PINNED = "stable", "canary", "pinned"
KEPT_VERSIONS = 3


class Loaded(Protocol):
    """An adapter that an engine holds ready; every engine knows its own kind."""

    @property
    def digest(self) -> str: ...


class Loads(Protocol):
    """Makes adapters ready to serve."""

    def load(self, adapter: Adapter) -> Loaded: ...


@dataclass(frozen=True)
class ServedVersion:
    """A version ready to serve."""

    id: str
    adapter: Loaded


@dataclass(frozen=True)
class Variant:
    """A version under comparison (A/B): `share` of the conversations that are not the canary's."""

    name: str
    version: ServedVersion
    share: float


@dataclass(frozen=True)
class Arms:
    """What is served: `canary_share` of conversations go to `canary`, then the variants take theirs.

    Raises:
        ValueError: the variants' shares are more than everything, or two have one name.
    """

    stable: ServedVersion
    canary: ServedVersion | None = None
    canary_share: float = 0.0
    variants: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        names = [STABLE, CANARY, PINNED, *(variant.name for variant in self.variants)]
        if len(set(names)) != len(names):
            raise ValueError(f"two arms have one name among {names[3:]}, or one that is taken")
        if any(v.share < 0 for v in self.variants) or sum(v.share for v in self.variants) > 1:
            raise ValueError("the shares of variants must be positive and together at most 1")

    @property
    def named(self) -> dict[str, ServedVersion]:
        """Every arm that has a version."""
        found = {STABLE: self.stable, CANARY: self.canary, **{v.name: v.version for v in self.variants}}
        return {name: version for name, version in found.items() if version is not None}


@dataclass(frozen=True)
class Choice:
    """The arm and version one request is pinned to."""

    arm: str
    version: ServedVersion


@dataclass(frozen=True)
class _Routing:
    arms: Arms
    previous: tuple[ServedVersion, ...] = ()


class Router:
    """Holds the current arms and the last versions that left them."""

    def __init__(self, arms: Arms) -> None:
        self._routing = _Routing(arms)

    @property
    def arms(self) -> Arms:
        return self._routing.arms

    @arms.setter
    def arms(self, arms: Arms) -> None:
        """Swap; what left is kept, the newest first, as many as were promised."""
        served = list(arms.named.values())
        left = [version for version in self._routing.arms.named.values() if version not in served]
        older = [version for version in self._routing.previous if version not in served and version not in left]
        self._routing = _Routing(arms, (*left, *older)[:KEPT_VERSIONS])

    @property
    def previous(self) -> tuple[ServedVersion, ...]:
        """Versions that were served before and are still in memory, the newest first."""
        return self._routing.previous

    @property
    def versions(self) -> tuple[ServedVersion, ...]:
        """Every version in memory, each once."""
        routing = self._routing
        found: list[ServedVersion] = []
        for version in (*routing.arms.named.values(), *routing.previous):
            if version not in found:
                found.append(version)
        return tuple(found)

    def choose(self, conversation: str) -> Choice:
        """The arm of a conversation: the same one as long as the arms stay."""
        arms = self.arms
        if arms.canary is not None and _position(arms.canary.id, conversation) < arms.canary_share:
            return Choice(CANARY, arms.canary)
        if arms.variants:
            position = _position("variants", conversation)
            for variant in arms.variants:
                if position < variant.share:
                    return Choice(variant.name, variant.version)
                position -= variant.share
        return Choice(STABLE, arms.stable)

    def arm(self, name: str) -> Choice | None:
        """A named arm, or None where it is empty."""
        version = self.arms.named.get(name)
        return Choice(name, version) if version is not None else None

    def pinned(self, version_id: str) -> Choice | None:
        """A version by its id, in use or kept; None where it is not in memory."""
        found = next((version for version in self.versions if version.id == version_id), None)
        return Choice(PINNED, found) if found is not None else None


def _position(drawing: str, conversation: str) -> float:
    """A conversation's place in [0, 1), drawn anew for every canary so that no user is always first."""
    digest = hashlib.sha256(f"{drawing}\n{conversation}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
