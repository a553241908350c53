"""The federation's sites behind a Flower grid: who they are, and asking them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from aggregator.federation import Federation
from aggregator.sites import NO_ANSWER, OUT_OF_REACH, OnWait, Pace, Reply
from common.errors import RoundError, TransportError, TrustError
from common.identity import IDENTITY_LABEL, canonical, verify
from common.update import Refusal

_CONNECT_TIMEOUT_S = 300.0
"""A node opens its model when it is first spoken to."""

_IDENTIFY_TIMEOUT_S = 60.0
_LONGEST_REASON = 200
_PULLED_AT_ONCE = 16
"""Replies a SuperLink is asked for in one call, so that not all of them are in memory at once."""

_NOT_DELIVERED = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}
"""Flower's codes for a node that went away; asked again, it may answer."""

_GONE = "gone"


class FlowerSites:
    """The federation's sites behind a Flower grid, by the names they proved.

    A node that does not prove a name of the roster takes no part, and neither do
    two nodes that prove the same one; the round goes on without them.
    """

    def __init__(self, grid: Grid, federation: Federation) -> None:
        self._grid = grid
        self._federation = federation
        self._site_of_node: dict[int, str] = {}
        self._failures: dict[int, str] = {}
        self._identify = NodeQuestion(grid, "query.identify")
        self._nonces: dict[int, bytes] = {}
        self._nodes = 0

    @classmethod
    def connect(cls, grid: Grid, federation: Federation, *, timeout_s: float = _CONNECT_TIMEOUT_S) -> FlowerSites:
        """Wait until every site of the roster has proved its name, or the time is over."""
        sites = cls(grid, federation)
        deadline, pace = time.monotonic() + timeout_s, Pace()
        while True:
            asked = sites.refresh(timeout_s=timeout_s)
            missing = set(federation.roster) - set(sites.names)
            left_s = deadline - time.monotonic()
            if not missing or asked >= len(federation.roster) or left_s <= 0:
                return sites
            pace.rest(came=False, at_most_s=left_s)

    def refresh(self, *, timeout_s: float = _IDENTIFY_TIMEOUT_S) -> int:
        """Look around until every node there is has said who it is; how many there are."""
        deadline, pace = time.monotonic() + timeout_s, Pace()
        asked = self._identify.open
        self._nonces = {node: nonce for node, nonce in self._nonces.items() if node in asked}
        self.look_around()
        while self._identify.open and (left_s := deadline - time.monotonic()) > 0:
            pace.rest(came=False, at_most_s=left_s)
            self._hear_names()
        return self._nodes

    def look_around(self) -> None:
        """Ask the nodes that have not proved a name yet, forget those that are gone; returns at once."""
        present = set(self._grid.get_node_ids())
        self._nodes = len(present)
        self._site_of_node = {node: site for node, site in self._site_of_node.items() if node in present}
        self._failures = {node: said for node, said in self._failures.items() if node in present}
        self._nonces = {node: nonce for node, nonce in self._nonces.items() if node in present}
        unknown = present - set(self._site_of_node) - set(self._nonces)
        new = {node: os.urandom(16) for node in sorted(unknown)}
        self._nonces.update(new)
        self._identify.ask({node: {"nonce": nonce} for node, nonce in new.items()})
        self._hear_names()

    def _hear_names(self) -> None:
        for node, fields in self._identify.answers():
            if node not in self._nonces:  # it left meanwhile
                continue
            self._failures.pop(node, None)
            site = self._proved_name(node, fields, self._nonces[node])
            if site is not None:
                self._site_of_node[node] = site
            if fields.get(_GONE):
                del self._nonces[node]  # asked again when it is back

    @property
    def names(self) -> tuple[str, ...]:
        proved = Counter(self._site_of_node.values())
        return tuple(sorted(site for site, nodes in proved.items() if nodes == 1))

    def absence(self, site: str) -> str:
        """See `aggregator.sites.Sites.absence`."""
        if site in self._site_of_node.values():
            return "two nodes hold its identity; stop one of them"
        failures = "; ".join(sorted(set(self._failures.values())))
        return f"no node proved to be it ({failures})" if failures else "no node proved to be it"

    def question(self, kind: str) -> SiteQuestion:
        """See `aggregator.sites.Sites.question`."""
        return SiteQuestion(self, NodeQuestion(self._grid, kind), stage=kind.removeprefix("query."))

    def ask(
        self,
        kind: str,
        requests: Mapping[str, Mapping[str, Any]],
        *,
        timeout_s: float,
        on_wait: OnWait = lambda replies, awaited, left_s: None,
    ) -> dict[str, Reply | Refusal]:
        """See `aggregator.sites.Sites.ask`."""
        stage = kind.removeprefix("query.")
        question = self.question(kind)
        question.ask(requests)
        awaited = question.open
        replies: dict[str, Reply | Refusal] = {
            site: Refusal(site, stage, self.absence(site)) for site in requests if site not in awaited
        }
        deadline, pace = time.monotonic() + timeout_s, Pace()
        told: frozenset[str] | None = None
        while (awaited := question.open) and (left_s := deadline - time.monotonic()) > 0:
            if awaited != told:
                on_wait(replies, told := awaited, left_s)
            came = list(question.answers())
            replies.update(came)
            pace.rest(came=bool(came), at_most_s=left_s)
        late = {site: Refusal(site, stage, f"{NO_ANSWER} {timeout_s:.0f} s") for site in question.open}
        return {**replies, **late}

    def node_of_site(self) -> dict[str, int]:
        """The node of each of the names."""
        names = set(self.names)
        return {site: node for node, site in self._site_of_node.items() if site in names}

    def _proved_name(self, node: int, fields: Mapping[str, Any], nonce: bytes) -> str | None:
        """The roster name a node has proved, or None; what a node said instead is kept for `absence`."""
        site, signature = fields.get("site"), fields.get("signature")
        if "error" in fields:
            self._failures[node] = f"a node answered {_reason(fields)}"
        if not isinstance(site, str) or not isinstance(signature, bytes) or site not in self._federation.roster:
            return None
        claim = canonical({"site": site, "node_id": str(node), "nonce": nonce.hex()})
        try:
            verify(self._federation.roster[site], IDENTITY_LABEL, claim, signature)
        except TrustError:
            self._failures[node] = f"a node claims to be {site} without its key"
            return None
        return site


class SiteQuestion:
    """See `aggregator.sites.Question`; a site's answer counts only from the node it proved to be."""

    def __init__(self, sites: FlowerSites, nodes: NodeQuestion, *, stage: str) -> None:
        self._sites = sites
        self._nodes = nodes
        self._stage = stage
        self._asked: dict[int, str] = {}

    @property
    def open(self) -> frozenset[str]:
        return frozenset(self._asked[node] for node in self._nodes.open)

    def ask(self, requests: Mapping[str, Mapping[str, Any]]) -> None:
        nodes = self._sites.node_of_site()
        to_send = {nodes[site]: request for site, request in requests.items() if site in nodes}
        busy = self._nodes.open
        to_send = {node: request for node, request in to_send.items() if node not in busy}
        self._asked.update({nodes[site]: site for site in requests if site in nodes})
        self._nodes.ask(to_send)

    def answers(self) -> Iterator[tuple[str, Reply | Refusal]]:
        for node, fields in self._nodes.answers():
            yield self._asked[node], self._read(self._asked[node], fields)

    def _read(self, site: str, fields: Mapping[str, Any]) -> Reply | Refusal:
        if fields.get(_GONE):
            return Refusal(site, self._stage, f"{OUT_OF_REACH}: {fields['reason']}")
        if "error" in fields:
            return Refusal(site, self._stage, _reason(fields))
        return Reply(fields)


class NodeQuestion:
    """Messages of one kind to Flower nodes, at most one open per node."""

    def __init__(self, grid: Grid, kind: str) -> None:
        self._grid = grid
        self._kind = kind
        self._node_of_message: dict[str, int] = {}
        self._unsent: list[int] = []

    @property
    def open(self) -> frozenset[int]:
        return frozenset(self._node_of_message.values()) | frozenset(self._unsent)

    def ask(self, requests: Mapping[int, Mapping[str, Any]]) -> None:
        messages = [
            Message(RecordDict({"request": ConfigRecord(dict(fields))}), dst_node_id=node, message_type=self._kind)
            for node, fields in requests.items()
        ]
        if not messages:
            return
        sent = list(self._grid.push_messages(messages)) or [""] * len(messages)
        for message_id, node in zip(sent, requests, strict=True):
            if message_id:
                self._node_of_message[message_id] = node
            else:  # Flower's answer where it does not take a message, for example to a node that left
                self._unsent.append(node)

    def answers(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Fields of each reply that has come, by node; a second reply to one message is none."""
        while self._unsent:
            yield self._unsent.pop(), {"error": "", _GONE: True, "reason": "the message was not taken"}
        for message_ids in _batched(list(self._node_of_message), _PULLED_AT_ONCE):
            for reply in self._grid.pull_messages(message_ids):
                node = self._node_of_message.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    yield node, _fields_of(reply)


def _fields_of(reply: Message) -> dict[str, Any]:
    """A reply's fields; what carried no answer is named by its failure."""
    if reply.has_error():
        code = reply.error.code
        failure = {"error": TransportError.__name__, "reason": f"the node failed with Flower code {code}"}
        return {**failure, _GONE: True} if code in _NOT_DELIVERED else failure
    record = reply.content.config_records.get("reply")
    if record is None:
        return {"error": RoundError.__name__, "reason": "the reply has no content"}
    return {name: value for name, value in record.items() if name != _GONE}


def _reason(fields: Mapping[str, Any]) -> str:
    """A site's own words, short and printable: they end up in terminals and pages."""
    said = [fields["error"], fields.get("reason", "")]
    text = ": ".join(part[:_LONGEST_REASON] if isinstance(part, str) else type(part).__name__ for part in said)
    return "".join(c for c in text[:_LONGEST_REASON] if c.isprintable())


def _batched(ids: Sequence[str], size: int) -> Iterator[list[str]]:
    remaining = iter(ids)
    while batch := list(islice(remaining, size)):
        yield batch
