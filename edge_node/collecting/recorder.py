"""Answered requests to the site's store: select, describe, redact, append, in this order.

The site's policy is asked before anything is kept, also in memory. What is not
selected is forgotten; its id can still be told for one that was given to a caller
(`ResponseIds`), so feedback about it changes nothing and is no error.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterable, Sequence

from common.errors import PrivacyError, TransportError
from common.inference.chat_tokenizer import ChatTokenizer
from common.telemetry import log_event
from edge_node.collecting.description import trajectories
from edge_node.collecting.importing import import_lines
from edge_node.collecting.pending import Held, Pending, recorded
from edge_node.collecting.redaction import Redactor
from edge_node.collecting.selection import Candidate, Decision, SelectionStrategy, Undecided
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Feedback, Trajectory
from edge_node.policy import PolicyFile, Redaction, ServeOnly, SitePolicy
from edge_node.serving.exchange import Exchange
from edge_node.serving.response_ids import ResponseIds

logger = logging.getLogger("headwater.edge")

_HOUR_S, _DAY_S = 3600.0, 86_400.0
_FAILED = Decision(False, "strategy failed")


class Recorder:
    """Records for one site; safe to use from several threads.

    Args:
        pseudonym_key: of the keyed hashes that users and conversations are stored as.
        base_digest: of the base model folder whose tokenizer made the token ids.
        decode: text of token ids, as that tokenizer reads them.
        clock: seconds since the epoch.
        ids: of the responses.
    """

    def __init__(
        self,
        *,
        site: str,
        store: TrajectoryStore,
        policy: PolicyFile,
        strategy: SelectionStrategy,
        pending: Pending,
        pseudonym_key: bytes,
        base_digest: str,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float],
        ids: ResponseIds,
    ) -> None:
        self._site = site
        self.store = store
        self.pending = pending
        self._policy = policy
        self._strategy = strategy
        self._pseudonym_key = pseudonym_key
        self._base_digest = base_digest
        self._decode = decode
        self.clock = clock
        self._ids = ids
        self._redactor: tuple[Redaction, Redactor] | None = None
        self._purged_at_s = 0.0

    def record(self, exchange: Exchange) -> None:
        """Store an answered request where policy and selection say so; never fails the request."""
        try:
            self._record(exchange)
        except Exception as error:  # outermost: what cannot be recorded was still answered
            reason = str(error) if isinstance(error, TransportError) else ""
            log_event(logger, "trajectory not stored", site=self._site, error=type(error).__name__, reason=reason)

    def _record(self, exchange: Exchange) -> None:
        policy, request = self._policy.current(), exchange.request
        if isinstance(policy, ServeOnly) or not policy.collection.enabled or request.prompt is not None:
            return
        now_s = self.clock()
        if now_s - self._purged_at_s > _HOUR_S:
            self.purge()
        self.pending.forget_old(now_s=now_s)
        self.consider(Held(recorded(exchange), held_since_s=now_s, marking=request.marking), policy)

    def consider(self, held: Held, law: SitePolicy) -> None:
        """Store an exchange, wait on, or forget it, as the strategy decides on what has been said.

        Raises:
            TransportError: the disk did not take it; it is as it was.
        """
        exchange = held.exchange
        decision = self._decide(held)
        if isinstance(decision, Undecided):
            self.pending.hold(held)
            return
        if decision.accepted:
            described = trajectories(
                held, decision, pseudonym=self.pseudonym, base_digest=self._base_digest, now_s=self.clock()
            )
            self.redactor(law).redact_all(described)
            self.store.append(described, now=self.clock)
        self.pending.drop(exchange.id)

    def _decide(self, held: Held) -> Decision | Undecided:
        """What the strategy says; one that fails selects nothing."""
        try:
            decision = self._strategy.decide(Candidate(held.exchange, held.marking, held.rewards, held.ratings))
        except Exception as error:  # whatever a site's own strategy raises; its text may quote the request
            log_event(logger, "selection failed", site=self._site, error=type(error).__name__)
            return _FAILED
        if not isinstance(decision, Decision | Undecided):
            log_event(logger, "selection failed", site=self._site, reason="neither a Decision nor UNDECIDED")
            return _FAILED
        return decision

    def was_answered(self, name: str, key_id: str) -> bool:
        """Whether an answer of this id was given to this key, whatever became of it."""
        return self._ids.given_to(key_id, name)

    def law(self) -> SitePolicy:
        """The policy in force.

        Raises:
            PrivacyError: there is no valid policy, or it forbids collecting.
        """
        law = self._policy.law()
        if not law.collection.enabled:
            raise PrivacyError(
                "policy.toml does not allow collecting; set collection.enabled",
                public="this site's policy does not allow collecting",
            )
        return law

    def add_feedback(self, trajectory_id: str, feedback: Feedback) -> int:
        """Keep what a user said about an answer, where it was recorded; the number of records it was added to.

        Raises:
            PrivacyError: there is no valid policy.
            ValueError: the rating is not a number.
        """
        law = self._policy.law()
        said = Trajectory(feedback=[feedback])
        self.redactor(law).redact(said)
        said.feedback[0].received_at_s = self.clock()
        return self.store.add_feedback(trajectory_id, said.feedback[0])

    def import_records(self, lines: Iterable[str], *, tokenizer: ChatTokenizer, model_version: str) -> int:
        """Store what another system recorded, under this site's law; how many records.

        Args:
            model_version: the version the answers count as served by.
        Raises:
            ConfigError: a line is not one of the known formats; nothing was stored.
            PrivacyError: there is no valid policy, or it forbids collecting.
        """
        redactor = self.redactor(self.law())
        imported = import_lines(
            lines,
            encode_prompt=tokenizer.encode,
            encode_answer=tokenizer.encode_answer,
            pseudonym=self.pseudonym,
            model_version=model_version,
            now_s=self.clock(),
        )
        for trajectory in imported:
            trajectory.base_digest = self._base_digest  # whose tokenizer has just made its token ids
            redactor.redact(trajectory)
        self.store.append(imported, now=self.clock)
        return len(imported)

    def purge(self) -> None:
        """Delete records past their time and forget what has waited too long; at start, often, and every hour."""
        now_s = self.clock()
        self.pending.forget_old(now_s=now_s)
        policy = self._policy.current()
        if isinstance(policy, ServeOnly) or not policy.collection.enabled:
            self.pending.clear()
        if isinstance(policy, ServeOnly):
            return
        self._purged_at_s = now_s
        try:
            self.store.purge(before_s=now_s - policy.collection.retention_days * _DAY_S)
        except OSError as error:
            log_event(logger, "old records not deleted", site=self._site, error=type(error).__name__)

    def pseudonym(self, text: str) -> bytes:
        """A name that only this site can compute, so nobody can look texts up in it."""
        return hmac.digest(self._pseudonym_key, text.encode(), "sha256")

    def redactor(self, policy: SitePolicy) -> Redactor:
        """The rules of a policy, compiled once."""
        if self._redactor is None or self._redactor[0] != policy.redaction:
            self._redactor = (policy.redaction, Redactor(policy.redaction, decode=self._decode))
        return self._redactor[1]
