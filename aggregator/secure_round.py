"""One round's updates to one aggregate without seeing them: gather who is ready, run a session, publish its sum.

The second implementation of `combine`. A session lives in this process's memory. If
it ends before any site has opened a sketch or signed a choice, the round tries once
more with the same updates; after that they are spent, and the round is voided. So a
killed aggregator finds the round open, and either finishes it with what sites still
may send or voids it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from aggregator.cohort import LIED, Accepted, Cohort, RoundStatus
from aggregator.combine import BESIDE_REFERENCE, OpenRound, logger
from aggregator.federation import Federation
from aggregator.gathering import gather
from aggregator.sites import Reply, Sites
from aggregator.witness import Witness
from common.errors import ConfigError, RoundError, TrustError
from common.plan import sign_plan
from common.secagg import ServerSession, Summed, Terms, derive_terms
from common.secagg.encoding import encode
from common.secagg.limits import Past, eligible
from common.secagg.messages import Ready, Upload
from common.secagg.selection import STAGES
from common.secagg.server import COMPLAINTS, SILENCE
from common.telemetry import log_event
from common.update import NOT_CHARGED, Aggregate, LedgerHead, Refusal, Voided

_KIND = "query.secagg"
"""Of a message that carries one of a session's nine steps."""

_SESSION_SHARE = 0.25
"""Of the time to the deadline that is kept for the session itself."""

_SESSIONS = 2


def combine_securely(current: OpenRound, sites: Sites, federation: Federation, witness: Witness) -> Aggregate | Voided:
    """Run one round against the sites that are there, in the federation's secure mode.

    Raises:
        TransportError: the choice, or the witness of the sites' ledgers, could not be stored.
    """
    try:
        terms = round_terms(current, federation)
    except (ConfigError, TrustError) as error:
        return Voided(current.plan.digest, str(error), ())
    ask = _Asking(current, sites, federation, witness, needed=terms.minimum_included)
    excluded = {**_out_of_the_window(terms, current.past), **current.excluded}  # not asked, so they pay nothing
    cohort = Cohort(current.plan.round, tuple(federation.roster), terms.minimum_included, excluded)
    window_s = federation.collect_timeout_s if current.time_left_s is None else current.time_left_s
    gather(
        cohort,
        sites,
        _KIND,
        request=lambda site: ask.request(site, encode(Ready(terms))),
        settle=_readiness,
        window_s=window_s * (1 - _SESSION_SHARE),
        report=current.report,
    )
    refused = dict(cohort.refused)
    present, reason = frozenset(cohort.accepted), ""
    wanted = terms.directions and len(present) > terms.minimum_included  # else nothing can be left out
    reference_D = current.reference() if wanted else None
    for _ in range(_SESSIONS):
        if len(present) < terms.minimum_included:
            reason = reason or f"{len(present)} updates can be summed, at least {terms.minimum_included} are needed"
            break
        session = ServerSession(
            terms,
            key=federation.key,
            session=os.urandom(32),
            present=present,
            past=current.past,
            check_upload=lambda name, upload: _check_ledger(upload, federation.roster[name]),
            reference_D=reference_D,
        )
        try:
            summed = run_session(session, current, ask)
        except RoundError as error:
            reason = str(error)
        else:
            refused.update({refusal.site: refusal for refusal in _refusals(session, ask.said)})
            if reference_D is not None and not session.held:
                log_event(logger, "reference not believed, or not applied", round=current.plan.round)
            for site, why in session.unapplied.items():
                log_event(logger, "left in: no other set of sites is signed", site=site, reason=why)
            how = federation.aggregation + (BESIDE_REFERENCE if session.held else "")
            return _aggregate(summed, current, federation, witness, refused, how)
        refused.update({refusal.site: refusal for refusal in _refusals(session, ask.said)})
        present -= set(session.guilty) | {r.site for r in session.refusals if r.reason == SILENCE}
        if session.is_spent:
            break
    return Voided(current.plan.digest, reason, tuple(refused[site] for site in sorted(refused)))


def round_terms(current: OpenRound, federation: Federation) -> Terms:
    """The terms as this aggregator derives them; every site derives its own."""
    return derive_terms(
        current.plan,
        mode=federation.aggregation,
        members=federation.members,
        dimension=sum(int(np.prod(shape)) for shape in current.shapes.values()),
        snapshot=current.plan.adapter_version,
        limits=federation.limits,
        word_bits=federation.word_bits,
    )


def _out_of_the_window(terms: Terms, past: Past) -> dict[str, str]:
    """Sites that no other would agree to sum before the window of rounds ends, and why."""
    window = terms.limits.window
    last = (terms.round - 1) // window * window + window
    reason = f"it was left out of an earlier sum; the others go on without it up to round {last}"
    return dict.fromkeys(set(terms.names) - eligible(terms, past), reason)


def _readiness(site: str, reply: Reply | Refusal) -> Accepted | Refusal:
    if isinstance(reply, Refusal):
        return reply
    if dict(reply.fields) == {"reply": b""}:
        return Accepted(np.empty(0, np.float32), None)
    return Refusal(site, "validate", "the reply is not one to a secure session")


class _Asking:
    """How a session's requests travel."""

    def __init__(
        self, current: OpenRound, sites: Sites, federation: Federation, witness: Witness, *, needed: int
    ) -> None:
        self._plan, self._sites, self._federation, self._witness = current.plan, sites, federation, witness
        self._report, self._needed = current.report, needed
        self.step = ""
        self._signature = sign_plan(current.plan, federation.key)
        self.said: dict[str, str] = {}

    def request(self, site: str, request: bytes) -> dict[str, object]:
        return {
            "payload": self._plan.payload,
            "signature": self._signature,
            "witness": self._witness.head(self._federation.roster[site]),
            "mode": self._federation.aggregation,
            "request": request,
        }

    def __call__(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        """Every site's reply; those that refuse or do not answer in time have none."""
        asked = {site: self.request(site, request) for site, request in requests.items()}

        def tell(replies: Mapping[str, Reply | Refusal], awaited: frozenset[str], left_s: float) -> None:
            received = tuple(sorted(site for site, reply in replies.items() if isinstance(reply, Reply)))
            refused = tuple(reply for _, reply in sorted(replies.items()) if isinstance(reply, Refusal))
            waiting = tuple(sorted(awaited))
            self._report(RoundStatus(self._plan.round, received, refused, waiting, (), self._needed, left_s, self.step))

        replies = self._sites.ask(_KIND, asked, timeout_s=self._federation.step_timeout_s, on_wait=tell)
        self.said.update({site: reply.reason for site, reply in replies.items() if isinstance(reply, Refusal)})
        found = {site: reply.fields.get("reply") for site, reply in replies.items() if isinstance(reply, Reply)}
        return {site: reply for site, reply in found.items() if isinstance(reply, bytes)}


def run_session(session: ServerSession, current: OpenRound, ask: _Asking) -> Summed:
    """Take a session to its end; whom it sums is written down before anyone signs it.

    Raises:
        RoundError: it ended without a sum.
    """
    requests, kept = session.start(), False
    while requests:
        if session.included and not kept:
            current.keep_choice(session.included)
            kept = True
        ask.step = session.awaits
        requests = session.advance(ask(requests))
    assert session.result is not None
    return session.result


def _aggregate(
    summed: Summed,
    current: OpenRound,
    federation: Federation,
    witness: Witness,
    refused: Mapping[str, Refusal],
    how: str,
) -> Aggregate:
    heads = {name: upload.ledger_head for name, upload in summed.uploads.items() if upload.ledger_head}
    witness.remember({federation.roster[name]: LedgerHead.parse(head) for name, head in heads.items()})
    held = [refused[site] for site in sorted(refused) if site not in summed.included or refused[site].stage == LIED]
    return Aggregate(
        current.plan.digest,
        summed.mean_D.astype(np.float32),
        summed.included,
        tuple(held),
        how,
    )


def _refusals(session: ServerSession, said: Mapping[str, str]) -> Iterable[Refusal]:
    """Why sites were left out, in their own words where they refused; a proven lie above everything else.

    What could not be used is held against its site, as in `combine.validate`.
    """
    for refusal in session.refusals:
        if refusal.reason == SILENCE:
            yield replace(refusal, reason=said.get(refusal.site, SILENCE))
        elif refusal.stage in (*STAGES, COMPLAINTS):
            yield refusal
        else:
            yield Refusal(refusal.site, "validate", f"{refusal.stage}: {refusal.reason}")
    for site, reason in session.guilty.items():
        yield Refusal(site, LIED, reason)


def _check_ledger(upload: Upload, public: bytes) -> None:
    """Raise TrustError where an upload was charged and shows no ledger of its site's."""
    if upload.ledger_entry != NOT_CHARGED:
        LedgerHead.parse(upload.ledger_head).verify(public)
    elif upload.ledger_head:
        raise TrustError("it was not charged and shows a ledger")
