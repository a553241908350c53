"""The main job, top to bottom: plan, combine, publish, watch the canary; then again.

Works over any Flower grid: in this process, over Ray, or over a SuperLink.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from aggregator.combine import OpenRound, combine
from aggregator.federation import Federation
from aggregator.plan import make_plan
from aggregator.publish import publish
from aggregator.rules import tolerated_reports
from aggregator.sites import Reply
from common.adapter import Adapter
from common.errors import RoundError, TransportError, TrustError
from common.identity import GOLDEN_LABEL, IDENTITY_LABEL, SealingKey, canonical, sha256_hex, verify
from common.tasks import math as math_task
from common.update import Refusal, Voided
from model_hub.evidence import PairedOutcome
from model_hub.hub import Hub
from model_hub.rollout import Stage

GOLDEN_PROMPTS_PER_SITE = 20
_CONNECT_TIMEOUT_S = 120.0
_IDENTIFY_TIMEOUT_S = 60.0
_GOLDEN_TIMEOUT_S = 300.0
_POLL_S = 0.05
_LONGEST_REASON = 200

Wait = Callable[[str], None]
"""Called where the aggregator has nothing to do until the sites did something: `collect` or `canary`."""


@dataclass(frozen=True)
class RoundRecord:
    """What became of one round; `version` and `stage` are None where it was voided."""

    number: int
    participants: tuple[str, ...]
    refused: tuple[Refusal, ...]
    version: str | None
    stage: Stage | None
    void_reason: str | None = None


def run_rounds(
    grid: Grid,
    federation: Federation,
    hub: Hub,
    *,
    clock: Callable[[], float],
    wait: Wait,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> list[RoundRecord]:
    """Run all planned rounds.

    Args:
        grid: a Flower grid whose nodes run `edge_node.client_app`.
        clock: seconds since the epoch, for deadlines.
        wait: see `Wait`; in production it sleeps, in a simulation the users act.
        on_round: told of each round as it ends.
    """
    sites = FlowerSites.connect(grid, federation)
    records = []
    for number in range(1, federation.planned_rounds + 1):
        wait("collect")
        sites.refresh()
        current = open_round(federation, hub, number=number, now_s=clock())
        outcome = combine(current, sites, federation)
        if isinstance(outcome, Voided):
            record = RoundRecord(number, (), outcome.refusals, None, None, outcome.reason)
        else:
            version = publish(outcome, current.plan, hub)
            watch_canary(sites, federation, hub, voters=outcome.participants, wait=wait)
            stage = hub.version(version.id).stage
            record = RoundRecord(number, outcome.participants, outcome.refusals, version.id, stage)
        records.append(record)
        on_round(record)
    return records


def open_round(federation: Federation, hub: Hub, *, number: int, now_s: float) -> OpenRound:
    """A plan on the stable version, with a fresh key to seal updates to."""
    sealing_key = SealingKey(X25519PrivateKey.generate())
    stable = hub.stable
    adapter = hub.adapter(stable.id)
    plan = make_plan(federation, stable, adapter, number=number, sealing_key=sealing_key, now_s=now_s)
    return OpenRound(plan, sealing_key, phase_shapes(adapter, plan.lora_phase))


def phase_shapes(adapter: Adapter, phase: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of what one phase trains, in sorted order."""
    return {name: adapter.tensors[name].shape for name in adapter.names(phase)}


def watch_canary(sites: FlowerSites, federation: Federation, hub: Hub, *, voters: Sequence[str], wait: Wait) -> None:
    """Replay golden prompts on both arms, window after window, until the hub has decided.

    Only `voters` are asked: a site whose update was refused has no say in what is
    served. A site that does not answer in time is not asked again for this canary.
    """
    asked = [site for site in sites.names if site in voters]
    window = 0
    while (canary := hub.canary) is not None:
        wait("canary")
        window += 1
        requests = {site: _golden_request(canary.id, hub.stable.id, window=window, site=site) for site in asked}
        replies = sites.ask("query.golden", requests, timeout_s=_GOLDEN_TIMEOUT_S)
        asked = [site for site in asked if not _is_silence(replies[site])]
        outcomes = {
            site: paired_outcomes(reply, requests[site], site_public=federation.roster[site])
            for site, reply in replies.items()
        }
        hub.observe(outcomes, liars=tolerated_reports(len(asked)))


def _golden_request(canary_id: str, control_id: str, *, window: int, site: str) -> dict[str, Any]:
    """Prompts and sampling seed of their own for every canary, window and site: evidence never repeats itself."""
    seed = int(sha256_hex(f"golden/{canary_id}/{window}/{site}".encode())[:8], 16)
    problems = math_task.problems(math_task.Distribution(), math_task.Split.GOLDEN, seed)
    return {
        "canary_id": canary_id,
        "control_id": control_id,
        "task": math_task.NAME,
        "prompts": [problem.prompt for problem in islice(problems, GOLDEN_PROMPTS_PER_SITE)],
        "seed": seed,
    }


def paired_outcomes(reply: Reply | Refusal, request: Mapping[str, Any], *, site_public: bytes) -> list[PairedOutcome]:
    """Outcomes of one site; none where the reply is malformed, so it can neither sway nor stop the test."""
    if isinstance(reply, Refusal):
        return []
    fields = dict(reply.fields)
    signature = fields.pop("signature", None)
    names = ("canary_error", "control_error", "canary_reward", "control_reward")
    columns = [fields.get(name) for name in names]
    if set(fields) != set(names) or not isinstance(signature, bytes):
        return []
    if not all(isinstance(c, list) and len(c) == len(request["prompts"]) for c in columns):
        return []
    pairs = [PairedOutcome(*values) for values in zip(*columns, strict=True)]
    if not all(map(_is_well_formed, pairs)):
        return []
    try:
        verify(site_public, GOLDEN_LABEL, canonical({"request": dict(request), "outcomes": fields}), signature)
    except TrustError:
        return []
    return pairs


def _is_well_formed(pair: PairedOutcome) -> bool:
    errors, rewards = (pair.canary_error, pair.control_error), (pair.canary_reward, pair.control_reward)
    return all(type(e) is bool for e in errors) and all(type(r) is float and 0 <= r <= 1 for r in rewards)


def _is_silence(reply: Reply | Refusal) -> bool:
    return isinstance(reply, Refusal) and reply.reason.startswith(_NO_ANSWER)


_NO_ANSWER = "no answer within"


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
            sites.refresh()
            missing = set(federation.roster) - set(sites.names)
            all_there = len(list(grid.get_node_ids())) >= len(federation.roster)
            if not missing or all_there or time.monotonic() >= deadline:
                return sites
            time.sleep(_POLL_S)

    def refresh(self) -> None:
        """Ask the nodes that have not proved a name yet, and forget those that are gone."""
        present = set(self._grid.get_node_ids())
        self._site_of_node = {node: site for node, site in self._site_of_node.items() if node in present}
        unknown = sorted(present - set(self._site_of_node))
        nonce = os.urandom(16)
        requests = {node: {"nonce": nonce} for node in unknown}
        answers = _exchange(self._grid, "query.identify", requests, timeout_s=_IDENTIFY_TIMEOUT_S)
        self._failures = set()
        for node in unknown:
            site = self._proved_name(node, answers.get(node, {}), nonce)
            if site is not None:
                self._site_of_node[node] = site

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
                replies[site] = Refusal(site, stage, f"{_NO_ANSWER} {timeout_s:.0f} s")
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


def make_server_app(main: Callable[[Grid], None]) -> ServerApp:
    """A Flower ServerApp that runs `main` on its grid."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid)

    return app
