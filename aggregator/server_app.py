"""The main job, top to bottom: plan, combine, publish, watch the canary; then again.

Works over any Flower grid: in this process, over Ray, or over a SuperLink.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from aggregator.combine import OpenRound, combine
from aggregator.federation import Federation
from aggregator.plan import make_plan
from aggregator.publish import publish
from aggregator.sites import Reply
from common.adapter import Adapter
from common.errors import RoundError, TransportError, TrustError
from common.identity import SealingKey, canonical, verify
from common.tasks import math as math_task
from common.update import Refusal, Voided
from model_hub.evidence import PairedOutcome
from model_hub.hub import Hub

IDENTITY_LABEL = "identify"
GOLDEN_PROMPTS_PER_SITE = 10
_IDENTIFY_TIMEOUT_S = 60.0
_GOLDEN_TIMEOUT_S = 300.0
_POLL_S = 0.05

Wait = Callable[[str], None]
"""Called where the aggregator has nothing to do until the sites did something: `collect` or `canary`."""


@dataclass(frozen=True)
class RoundRecord:
    """What became of one round; `version` is None where it was voided."""

    number: int
    participants: tuple[str, ...]
    refused: tuple[Refusal, ...]
    version: str | None
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
        current = open_round(federation, hub, number=number, now_s=clock())
        outcome = combine(current, sites, federation)
        if isinstance(outcome, Voided):
            record = RoundRecord(number, (), outcome.refusals, None, outcome.reason)
        else:
            version = publish(outcome, current.plan, hub)
            watch_canary(sites, hub, seed=number, wait=wait)
            record = RoundRecord(number, outcome.participants, outcome.refusals, version.id)
        records.append(record)
        on_round(record)
    return records


def open_round(federation: Federation, hub: Hub, *, number: int, now_s: float) -> OpenRound:
    """A signed-to-be plan on the stable version, with a fresh key to seal updates to."""
    sealing_key = SealingKey(X25519PrivateKey.generate())
    plan = make_plan(federation, hub.stable, number=number, sealing_key=sealing_key, now_s=now_s)
    return OpenRound(plan, sealing_key, phase_shapes(hub.adapter(hub.stable.id), plan.lora_phase))


def phase_shapes(adapter: Adapter, phase: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of what one phase trains, in sorted order."""
    return {name: adapter.tensors[name].shape for name in adapter.names(phase)}


def watch_canary(sites: FlowerSites, hub: Hub, *, seed: int, wait: Wait) -> None:
    """Replay golden prompts on both arms, window after window, until the hub has decided."""
    golden = math_task.problems(math_task.Distribution(), math_task.Split.GOLDEN, seed)
    while hub.canary is not None:
        wait("canary")
        requests = {
            site: {
                "task": math_task.NAME,
                "prompts": [next(golden).prompt for _ in range(GOLDEN_PROMPTS_PER_SITE)],
                "seed": seed,
            }
            for site in sites.names
        }
        replies = sites.ask("query.golden", requests, timeout_s=_GOLDEN_TIMEOUT_S)
        hub.observe([pair for reply in replies.values() for pair in _paired_outcomes(reply)])


def _paired_outcomes(reply: Reply | Refusal) -> list[PairedOutcome]:
    """Outcomes of one site; none where the reply is malformed, so it cannot sway or stop the test."""
    if isinstance(reply, Refusal):
        return []
    try:
        pairs = [
            PairedOutcome(*values)
            for values in zip(
                reply.fields["canary_error"],
                reply.fields["control_error"],
                reply.fields["canary_reward"],
                reply.fields["control_reward"],
                strict=True,
            )
        ]
    except (KeyError, TypeError, ValueError):
        return []
    well_formed = all(
        isinstance(p.canary_error, bool)
        and isinstance(p.control_error, bool)
        and 0 <= p.canary_reward <= 1
        and 0 <= p.control_reward <= 1
        for p in pairs
    )
    return pairs[:GOLDEN_PROMPTS_PER_SITE] if well_formed else []


class FlowerSites:
    """The federation's sites behind a Flower grid, by the names they proved."""

    def __init__(self, grid: Grid, node_of_site: Mapping[str, int]) -> None:
        self._grid = grid
        self._node_of_site = dict(node_of_site)

    @classmethod
    def connect(cls, grid: Grid, federation: Federation) -> FlowerSites:
        """Ask every node who it is; a node that does not prove a roster name is left out.

        Raises:
            RoundError: two nodes proved the same name.
        """
        nonce = os.urandom(16)
        nodes = list(grid.get_node_ids())
        answers = _exchange(
            grid, "query.identify", {node: {"nonce": nonce} for node in nodes}, timeout_s=_IDENTIFY_TIMEOUT_S
        )
        node_of_site: dict[str, int] = {}
        for node, fields in answers.items():
            site, signature = fields.get("site"), fields.get("signature")
            if not isinstance(site, str) or not isinstance(signature, bytes) or site not in federation.roster:
                continue
            claim = canonical({"site": site, "node_id": str(node), "nonce": nonce.hex()})
            try:
                verify(federation.roster[site], IDENTITY_LABEL, claim, signature)
            except TrustError:
                continue
            if site in node_of_site:
                raise RoundError(f"two nodes hold the identity of {site}; stop one of them")
            node_of_site[site] = node
        return cls(grid, node_of_site)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._node_of_site))

    def ask(
        self, kind: str, requests: Mapping[str, Mapping[str, Any]], *, timeout_s: float
    ) -> dict[str, Reply | Refusal]:
        """See `aggregator.sites.Sites.ask`."""
        stage = kind.removeprefix("query.")
        by_node = {self._node_of_site[site]: request for site, request in requests.items()}
        answers = _exchange(self._grid, kind, by_node, timeout_s=timeout_s)
        replies: dict[str, Reply | Refusal] = {}
        for site in requests:
            fields = answers.get(self._node_of_site[site])
            if fields is None:
                replies[site] = Refusal(site, stage, f"no answer within {timeout_s:.0f} s")
            elif "error" in fields:
                replies[site] = Refusal(site, stage, f"{fields['error']}: {str(fields.get('reason', ''))[:300]}")
            else:
                replies[site] = Reply(fields)
        return replies


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
