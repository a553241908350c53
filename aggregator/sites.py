"""How a round talks to the sites, whatever carries the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.update import Refusal

NO_ANSWER = "no answer within"
"""How the reason of a refusal for silence begins."""


@dataclass(frozen=True)
class Reply:
    """A site's answer, not yet believed."""

    fields: Mapping[str, Any]


class Sites(Protocol):
    """The sites that identified themselves, by name."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def absence(self, site: str) -> str:
        """Why a site of the roster is not among the names."""
        ...

    def ask(
        self, kind: str, requests: Mapping[str, Mapping[str, Any]], *, timeout_s: float
    ) -> dict[str, Reply | Refusal]:
        """Send one request per site and wait; a site that fails or is late is a Refusal."""
        ...


def is_silence(reply: Reply | Refusal) -> bool:
    """Whether a site did not answer in time."""
    return isinstance(reply, Refusal) and reply.reason.startswith(NO_ANSWER)
