"""The federation's sites behind a Flower grid: who they are, and asking them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from aggregator.federation import Federation
from aggregator.sites import NO_ANSWER, Reply
from common.errors import RoundError, TransportError, TrustError
from common.identity import IDENTITY_LABEL, canonical, verify
from common.update import Refusal

_CONNECT_TIMEOUT_S = 300.0
"""A node opens its model when it is first spoken to."""

_IDENTIFY_TIMEOUT_S = 60.0
_POLL_S = 0.05
_LONGEST_REASON = 200


class FlowerSites:
    """The federation's sites behind a Flower grid, by the names they proved.

    A node that does not prove a name of the roster takes no part, and neither do
    two nodes that prove the same one; the round goes on without them.
    """

    def __init__(self, grid: Grid, federation: Federation) -> None:
        self._grid = grid
        self._federation = federation
        self._site_of_node: dict[int, str] = {}
        self._failures: set[str] = set()

    @classmethod
    def connect(cls, grid: Grid, federation: Federation, *, timeout_s: float = _CONNECT_TIMEOUT_S) -> FlowerSites:
        """Wait until every site of the roster has proved its name, or the time is over."""
        sites = cls(grid, federation)
        deadline = time.monotonic() + timeout_s
        while True:
            asked = sites.refresh(timeout_s=timeout_s)
            missing = set(federation.roster) - set(sites.names)
            if not missing or asked >= len(federation.roster) or time.monotonic() >= deadline:
                return sites
            time.sleep(_POLL_S)

    def refresh(self, *, timeout_s: float = _IDENTIFY_TIMEOUT_S) -> int:
        """Ask the nodes that have not proved a name yet, and forget those that are gone; how many there are."""
        present = set(self._grid.get_node_ids())
        self._site_of_node = {node: site for node, site in self._site_of_node.items() if node in present}
        unknown = sorted(present - set(self._site_of_node))
        nonce = os.urandom(16)
        requests = {node: {"nonce": nonce} for node in unknown}
        answers = _exchange(self._grid, "query.identify", requests, timeout_s=timeout_s)
        self._failures = set()
        for node in unknown:
            site = self._proved_name(node, answers.get(node, {}), nonce)
            if site is not None:
                self._site_of_node[node] = site
        return len(present)

    @property
    def names(self) -> tuple[str, ...]:
        proved = Counter(self._site_of_node.values())
        return tuple(sorted(site for site, nodes in proved.items() if nodes == 1))

    def absence(self, site: str) -> str:
        """See `aggregator.sites.Sites.absence`."""
        if site in self._site_of_node.values():
            return "two nodes hold its identity; stop one of them"
        failures = "; ".join(sorted(self._failures))
        return f"no node proved to be it ({failures})" if failures else "no node proved to be it"

    def ask(
        self, kind: str, requests: Mapping[str, Mapping[str, Any]], *, timeout_s: float
    ) -> dict[str, Reply | Refusal]:
        """See `aggregator.sites.Sites.ask`."""
        stage = kind.removeprefix("query.")
        node_of_site = {site: node for node, site in self._site_of_node.items() if site in self.names}
        by_node = {node_of_site[site]: request for site, request in requests.items() if site in node_of_site}
        answers = _exchange(self._grid, kind, by_node, timeout_s=timeout_s)
        replies: dict[str, Reply | Refusal] = {}
        for site in requests:
            fields = answers.get(node_of_site.get(site, -1))
            if site not in node_of_site:
                replies[site] = Refusal(site, stage, self.absence(site))
            elif fields is None:
                replies[site] = Refusal(site, stage, f"{NO_ANSWER} {timeout_s:.0f} s")
            elif "error" in fields:
                replies[site] = Refusal(site, stage, _reason(fields))
            else:
                replies[site] = Reply(fields)
        return replies

    def _proved_name(self, node: int, fields: Mapping[str, Any], nonce: bytes) -> str | None:
        """The roster name a node has proved, or None; what a node said instead is kept for `absence`."""
        site, signature = fields.get("site"), fields.get("signature")
        if "error" in fields:
            self._failures.add(f"a node answered {_reason(fields)}")
        if not isinstance(site, str) or not isinstance(signature, bytes) or site not in self._federation.roster:
            return None
        claim = canonical({"site": site, "node_id": str(node), "nonce": nonce.hex()})
        try:
            verify(self._federation.roster[site], IDENTITY_LABEL, claim, signature)
        except TrustError:
            self._failures.add(f"a node claims to be {site} without its key")
            return None
        return site


def _reason(fields: Mapping[str, Any]) -> str:
    """A site's own words, short and printable: they end up in terminals and pages."""
    text = f"{fields['error']}: {fields.get('reason', '')}"[:_LONGEST_REASON]
    return "".join(c for c in text if c.isprintable())


def _exchange(
    grid: Grid, kind: str, requests: Mapping[int, Mapping[str, Any]], *, timeout_s: float
) -> dict[int, dict[str, Any]]:
    """Send one message per node and collect the replies' fields; late nodes are missing."""
    node_of_message: dict[str, int] = {}
    messages = [
        Message(RecordDict({"request": ConfigRecord(dict(fields))}), dst_node_id=node, message_type=kind)
        for node, fields in requests.items()
    ]
    for message_id, node in zip(grid.push_messages(messages), requests, strict=True):
        if message_id:
            node_of_message[message_id] = node
    answers: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while node_of_message and time.monotonic() < deadline:
        for reply in grid.pull_messages(list(node_of_message)):
            message_id = reply.metadata.reply_to_message_id
            if message_id in node_of_message:
                answers[node_of_message.pop(message_id)] = _fields_of(reply)
        if node_of_message:
            time.sleep(_POLL_S)
    return answers


def _fields_of(reply: Message) -> dict[str, Any]:
    """A reply's fields; what carried no answer is named by its failure."""
    if reply.has_error():
        return {"error": TransportError.__name__, "reason": f"the node failed with Flower code {reply.error.code}"}
    record = reply.content.config_records.get("reply")
    if record is None:
        return {"error": RoundError.__name__, "reason": "the reply has no content"}
    return dict(record)
