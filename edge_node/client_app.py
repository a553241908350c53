"""The node's side of a round, as a Flower ClientApp.

Four messages: who are you (`identify`), hand over the update for this plan
(`train`), take the next step of a secure session with it (`secagg`), replay
these public prompts on both arms (`golden`). Messages are short:
a site that is still training says so, and is asked again. Every message first
looks at what the hub has published. What fails is answered with the class
of the error and, where there is one, the fixed text it may tell others; the rest
is in the site's own log.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from common.errors import HeadwaterError
from common.identity import GOLDEN_LABEL, IDENTITY_LABEL, SigningKey, canonical
from common.telemetry import log_event
from common.update import UNFINISHED, SealedUpdate
from model_hub.evidence import PairedOutcome

logger = logging.getLogger("headwater.edge")

SEE_LOG = "see the site's own log"


class Site(Protocol):
    """What a round needs of an edge node."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> SigningKey: ...

    def look_again(self) -> None: ...
    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]]
    ) -> SealedUpdate | None: ...
    def secure_answer(
        self, payload: bytes, signature: bytes, witness: str, *, mode: str, request: bytes
    ) -> bytes | None: ...
    def replay_golden(
        self, prompts: list[str], *, canary_id: str, control_id: str, task: str, seed: int
    ) -> list[PairedOutcome]: ...


OpenSite = Callable[[Context], Site]


def make_client_app(open_site: OpenSite) -> ClientApp:
    """The ClientApp of a site; `open_site` finds the node this process runs."""
    app = ClientApp()

    @app.query("identify")
    def identify(message: Message, context: Context) -> Message:
        def statement(site: Site, asked: Mapping[str, Any]) -> dict[str, Any]:
            claim = {"site": site.name, "node_id": str(context.node_id), "nonce": asked["nonce"].hex()}
            return {"site": site.name, "signature": site.key.sign(IDENTITY_LABEL, canonical(claim))}

        return _answer(message, open_site, context, statement)

    @app.train()
    def hand_over(message: Message, context: Context) -> Message:
        def update(site: Site, asked: Mapping[str, Any]) -> dict[str, Any]:
            earlier = list(zip(asked["earlier_payloads"], asked["earlier_signatures"], strict=True))
            sealed = site.hand_over(asked["payload"], asked["signature"], asked["witness"], earlier)
            if sealed is None:
                return dict(UNFINISHED)
            return {
                "site": sealed.site,
                "plan_digest": sealed.plan_digest,
                "ledger_entry": sealed.ledger_entry,
                "ledger_head": sealed.ledger_head,
                "ciphertext": sealed.ciphertext,
                "signature": sealed.signature,
            }

        return _answer(message, open_site, context, update)

    @app.query("secagg")
    def secure(message: Message, context: Context) -> Message:
        def step(site: Site, asked: Mapping[str, Any]) -> dict[str, Any]:
            reply = site.secure_answer(
                asked["payload"], asked["signature"], asked["witness"], mode=asked["mode"], request=asked["request"]
            )
            return dict(UNFINISHED) if reply is None else {"reply": reply}

        return _answer(message, open_site, context, step)

    @app.query("golden")
    def golden(message: Message, context: Context) -> Message:
        def outcomes(site: Site, asked: Mapping[str, Any]) -> dict[str, Any]:
            pairs = site.replay_golden(
                list(asked["prompts"]),
                canary_id=asked["canary_id"],
                control_id=asked["control_id"],
                task=asked["task"],
                seed=asked["seed"],
            )
            columns = {
                "canary_error": [pair.canary_error for pair in pairs],
                "control_error": [pair.control_error for pair in pairs],
                "canary_reward": [float(pair.canary_reward) for pair in pairs],
                "control_reward": [float(pair.control_reward) for pair in pairs],
            }
            statement = canonical({"request": dict(asked), "outcomes": columns})
            return {**columns, "signature": site.key.sign(GOLDEN_LABEL, statement)}

        return _answer(message, open_site, context, outcomes)

    return app


def _answer(
    message: Message,
    open_site: OpenSite,
    context: Context,
    work: Callable[[Site, Mapping[str, Any]], dict[str, Any]],
) -> Message:
    try:
        site = open_site(context)
        site.look_again()
        fields = work(site, message.content["request"])
    except HeadwaterError as error:
        log_event(logger, "message refused", error=type(error).__name__, reason=str(error))
        fields = {"error": type(error).__name__, "reason": error.public or SEE_LOG}
    except Exception as error:  # outermost: Flower would send the exception's text to the server
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))
        log_event(logger, "message failed", error=type(error).__name__, reason=where)
        fields = {"error": type(error).__name__, "reason": SEE_LOG}
    return Message(RecordDict({"reply": ConfigRecord(fields)}), reply_to=message)
