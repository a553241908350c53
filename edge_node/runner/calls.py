"""One call of an agent: everything it asked the model for until it had its answer."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from edge_node.marking import Mark

_PORTS = {"http": 80, "https": 443}


@dataclass
class Response:
    """One answer of the model.

    Attributes:
        id: the response's id, by which feedback names it.
        endpoint: where it was asked for, as `endpoint_of` writes it.
        model: as the request named it.
        text: of the first choice, as far as it was read.
        tool_calls: how many the first choice made.
    """

    id: str
    endpoint: str
    model: str
    text: str = ""
    tool_calls: int = 0


@dataclass
class AgentCall:
    """What a strategy and a reward calculator look at.

    Attributes:
        agent: the agent that was called; None where the model was asked without one.
        inputs: what the agent was called with; the messages where there is no agent.
        output: what it answered; the last response's text where there is no agent.
        responses: answers of the model on the way, in the order they were asked for.
        marking: the mark the call was made under.
        rewards, ratings: none yet; the strategies of `edge_node.collecting.selection` look for them.
    """

    agent: Any = None
    inputs: Any = None
    output: Any = None
    responses: list[Response] = field(default_factory=list)
    marking: Mark | None = None
    rewards: Mapping[int, float] = field(default_factory=dict)
    ratings: Mapping[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def response_ids(self) -> list[str]:
        return [response.id for response in self.responses]

    @property
    def text(self) -> str:
        """The text of the last response."""
        return self.responses[-1].text if self.responses else ""

    @property
    def tool_calls(self) -> int:
        """Tool calls of all responses."""
        return sum(response.tool_calls for response in self.responses)

    def add(self, response: Response) -> None:
        with self._lock:
            self.responses.append(response)


def endpoint_of(url: str) -> str:
    """Scheme, host, port and path of a node, the same for every way to write them; every loopback name is one host.

    Raises:
        ValueError: it is no http(s) URL.
    """
    parts = urlsplit(url)
    host, scheme = parts.hostname, parts.scheme.lower()
    if scheme not in _PORTS or not host:
        raise ValueError(f"{url!r} is not an http or https URL")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{scheme}://{'localhost' if _loopback(host) else host}:{parts.port or _PORTS[scheme]}{path}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
