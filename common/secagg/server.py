"""The server's side of one session: replies of the sites in, the next requests out.

    requests = session.start()
    while requests:
        requests = session.advance(ask(requests))
    session.result

Every reply is checked before it counts; a site whose reply does not hold is out for
this session, by name and with a reason. That is no blame: blame needs a signed
contradiction, and is kept apart (`guilty`). Too few left ends the session with a
RoundError and no sum. The server sees masked words, sketches where the mode has
them, and one sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from common.errors import PrivacyError, RoundError, TrustError
from common.identity import SigningKey
from common.secagg import direction, masking, messages, opening
from common.secagg.context import SKETCH, Terms, check_included, check_terms
from common.secagg.encoding import decode, digest, encode
from common.secagg.graph import Graph, degree
from common.secagg.limits import Past, check_choice, eligible
from common.secagg.messages import SERVER, Reply, Signed, after_messages, after_names, after_uploads, say
from common.secagg.selection import Along, Selection, TooManyExcludedError, select
from common.secagg.shares import opens
from common.secagg.site import SketchSeed
from common.secagg.sketch import Sketch, as_floats
from common.update import Refusal

T = TypeVar("T")

Requests = dict[str, bytes]

SILENCE = "no reply"
"""Reason of a refusal where there was nothing to read; who carries the messages may know why."""

COMPLAINTS = "complaints"
"""Stage of a refusal by other sites' word alone."""

_ALLOWANCE_BYTES = 8192
"""Room per site for everything in a reply that is not masked words."""


@dataclass(frozen=True, eq=False)
class Summed:
    """What a session is for.

    Attributes:
        mean_D: weighted mean of the included updates, float64.
        uploads: what each included site said of its ledger.
    """

    mean_D: np.ndarray
    included: tuple[str, ...]
    uploads: Mapping[str, messages.Upload]


class ServerSession:
    """One session with the sites of the terms' roster.

    Args:
        session: 32 fresh random bytes.
        present: sites that are there; those that earlier rounds of the window left out are not asked.
        past: who was in the sums of earlier rounds.
        check_upload: raises TrustError where what a site says of its ledger does not hold.
        reference_D: what public data teach, float; where the terms allow it, an update that points the other way is
            excluded.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        key: SigningKey,
        session: bytes,
        present: Iterable[str],
        past: Past | None = None,
        check_upload: Callable[[str, messages.Upload], None] = lambda name, upload: None,
        reference_D: np.ndarray | None = None,
    ) -> None:
        check_terms(terms)
        if reference_D is not None and len(reference_D) != terms.dimension:
            raise ValueError(f"a reference of {len(reference_D)} values, the updates have {terms.dimension}")
        chosen_D = direction.rounded(reference_D) if reference_D is not None and terms.directions else None
        self._direction_D = chosen_D if chosen_D is not None and chosen_D.any() else None
        self._terms, self._key, self._session = terms, key, session
        self._past = past or {}
        self._invited = tuple(sorted(set(present) & eligible(terms, self._past)))
        self._spool: dict[str, np.ndarray] = {}
        self._check_upload = check_upload
        self._context = terms.context(session)
        self._next: Callable[[Mapping[str, bytes]], Requests] = self._collect_keys
        self._total_D = np.zeros(terms.dimension, terms.ring.dtype)
        self._sketches: dict[str, np.ndarray] = {}
        self._sketch: Sketch | None = None
        self._reports: dict[str, messages.SketchReport] = {}
        self.refusals: list[Refusal] = []
        self.guilty: dict[str, str] = {}
        self.included: tuple[str, ...] = ()
        self.held = False  # against a reference that was believed, and what it told was applied
        self.unapplied: dict[str, str] = {}
        self.is_spent = False
        self.result: Summed | None = None

    def start(self) -> Requests:
        offer = self._ask(messages.Offer(self._terms, self._session), bytes(32))
        return dict.fromkeys(self._invited, offer)

    def advance(self, replies: Mapping[str, bytes]) -> Requests:
        """Take the replies to the last requests; the next requests, none once `result` is there.

        Raises:
            RoundError: the session ends without a sum.
        """
        return self._next(replies)

    @property
    def awaits(self) -> str:
        """What the last requests ask for: keys, dealings, verdicts, published, uploads, agreements, sketches, …"""
        return self._next.__name__.removeprefix("_collect_")

    # --- reading replies

    @property
    def _words_bytes(self) -> int:
        """Of one upload."""
        return self._total_D.nbytes

    def _ask(self, message: Any, transcript: bytes) -> bytes:
        return encode(say(message, sender=SERVER, transcript=transcript, key=self._key))

    def _request(self, message: Any) -> bytes:
        return self._ask(message, self._context)

    def _blame(self, name: str, reason: str) -> None:
        self.guilty.setdefault(name, reason)

    def _refuse(self, name: str, stage: str, reason: str) -> None:
        self.refusals.append(Refusal(name, stage, reason))

    def _read(
        self,
        replies: Mapping[str, bytes],
        kind: type[T],
        transcript: bytes,
        asked: Iterable[str],
        check: Callable[[str, T, bytes], None] = lambda name, message, words: None,
    ) -> dict[str, tuple[Signed, T]]:
        """The replies that are what was asked for, said by who was asked; the others are refused."""
        found: dict[str, tuple[Signed, T]] = {}
        limit = self._words_bytes + _ALLOWANCE_BYTES * (len(self._terms.members) + 1)
        for name in sorted(asked):
            if name not in replies:
                self._refuse(name, kind.__name__, SILENCE)
                continue
            try:
                if len(replies[name]) > limit:
                    raise TrustError(f"the reply has {len(replies[name])} bytes, expected at most {limit}")
                reply = decode(Reply, replies[name])
                if reply.signed.sender != name:
                    raise TrustError("the reply speaks for another site")
                message = reply.signed.open(kind, public=self._terms.member(name).public, transcript=transcript)
                check(name, message, reply.words)
            except TrustError as error:
                self._refuse(name, kind.__name__, str(error))
                continue
            found[name] = (reply.signed, message)
        return found

    def _need(self, names: Iterable[str], what: str) -> None:
        try:
            check_included(self._terms, tuple(names))
        except TrustError as error:
            raise RoundError(f"{what}: {error}") from error

    # --- R0: keys

    def _collect_keys(self, replies: Mapping[str, bytes]) -> Requests:
        seen: set[bytes] = set()

        def check(name: str, keys: messages.Keys, words: bytes) -> None:
            if not (masking.contributes(keys.sharing) and masking.contributes(keys.masking)):
                self._blame(name, "it signed a key that makes no secret")
                raise TrustError("a key makes no secret: it is of low order")
            if {keys.sharing, keys.masking} & seen or keys.sharing == keys.masking:
                raise TrustError("a key is another site's")
            seen.update((keys.sharing, keys.masking))

        found = self._read(replies, messages.Keys, self._context, self._invited, check)
        self._need(found, "keys")
        self._keys = {name: keys for name, (_, keys) in found.items()}
        signed = tuple(signed for signed, _ in found.values())
        self._t1 = after_messages(self._context, signed)
        size = degree(len(found), colluders=self._terms.colluders, quorum=self._terms.quorum)
        self._graph = Graph(tuple(sorted(found)), size, self._t1)
        self._next = self._collect_dealings
        return dict.fromkeys(found, self._request(messages.Roll(signed)))

    # --- R1: shares, complaints

    def _collect_dealings(self, replies: Mapping[str, bytes]) -> Requests:
        self._shares: dict[str, dict[str, messages.Share]] = {}
        letters: dict[str, list[Signed]] = {name: [] for name in self._keys}

        def check(name: str, dealing: messages.Dealing, words: bytes) -> None:
            public = self._terms.member(name).public
            opened = [(s, s.open(messages.Share, public=public, transcript=self._t1)) for s in dealing.shares]
            holders = [share.holder for _, share in opened]
            if tuple(sorted(holders)) != self._graph.holders(name) or any(s.sender != name for s, _ in opened):
                raise TrustError("it dealt to others than its neighbours")
            if len({share.self_secret for _, share in opened}) != 1:
                raise TrustError("it committed to two secrets")
            self._shares[name] = {share.holder: share for _, share in opened}
            for signed, share in opened:
                if share.holder != name:
                    letters[share.holder].append(signed)

        self._read(replies, messages.Dealing, self._t1, self._keys, check)
        self._need(self._shares, "shares")
        self._next = self._collect_verdicts
        return {name: self._request(messages.Deal(tuple(letters[name]))) for name in self._shares}

    def _collect_verdicts(self, replies: Mapping[str, bytes]) -> Requests:
        def check(name: str, verdict: messages.Verdict, words: bytes) -> None:
            dealers = set(self._graph.neighbours(name)) & set(self._shares)
            if len(set(verdict.complaints)) != len(verdict.complaints) or not set(verdict.complaints) <= dealers:
                raise TrustError("it complains about a site that dealt it nothing")

        verdicts = self._read(replies, messages.Verdict, self._t1, self._shares, check)
        self._complaints: dict[str, dict[str, Signed]] = {}
        for name, (signed, verdict) in verdicts.items():
            for dealer in verdict.complaints:
                self._complaints.setdefault(dealer, {})[name] = signed
        self._checked = set(verdicts)
        possible = min(self._terms.colluders, self._graph.degree.share_threshold - 1)
        for dealer, complaints in self._complaints.items():
            if len(complaints) > possible:
                reason = f"{len(complaints)} sites cannot open the share it dealt them"
                if self._terms.colluders:  # so one of them at least is honest
                    self._blame(dealer, reason)
                else:
                    self._refuse(dealer, COMPLAINTS, reason)
                self._checked.discard(dealer)
        accused = [name for name in self._complaints if name in self._checked]
        self._next = self._collect_published
        if not accused:
            return self._next({})
        return {name: self._request(messages.Defend(tuple(self._complaints[name].values()))) for name in accused}

    def _collect_published(self, replies: Mapping[str, bytes]) -> Requests:
        accused = [name for name in self._complaints if name in self._checked]

        def check(name: str, published: messages.Published, words: bytes) -> None:
            if [share.holder for share in published.shares] != sorted(self._complaints[name]):
                raise TrustError("it published other shares than were asked for")
            for open_share in published.shares:
                share = self._shares[name][open_share.holder]
                if not opens(self._t1, name, share, open_share.self_share, open_share.key_share):
                    self._blame(name, f"the share it published for {open_share.holder} is not the one it committed to")
                    raise TrustError("it published a false share")

        answers = self._read(replies, messages.Published, self._t1, accused, check)
        self._admitted = tuple(sorted(self._checked - (set(accused) - set(answers))))
        self._need(self._admitted, "shares")
        self._t2 = after_names(self._t1, self._admitted)
        published: dict[str, list[Signed]] = {name: [] for name in self._admitted}
        for dealer, (signed, _) in answers.items():
            for holder in self._complaints[dealer]:
                if holder in published:
                    published[holder].append(signed)
        self._next = self._collect_uploads
        return {
            name: self._request(messages.Admitted(self._admitted, tuple(published[name]))) for name in self._admitted
        }

    # --- R2, R3: uploads, the agreement on them, sketches

    def _collect_uploads(self, replies: Mapping[str, bytes]) -> Requests:
        dtype = self._total_D.dtype

        def check(name: str, upload: messages.Upload, words: bytes) -> None:
            if len(words) != self._words_bytes:
                raise TrustError(f"{len(words)} bytes of masked words, expected {self._words_bytes}")
            if hashlib.sha256(words).digest() != upload.words_sha256:  # before anyone knows P
                raise TrustError("the masked words are not those it signed")
            self._check_upload(name, upload)
            words_D = np.frombuffer(words, dtype.newbyteorder("<")).astype(dtype, copy=False)
            if self._terms.mode == SKETCH:
                self._spool[name] = words_D
            else:
                np.add(self._total_D, words_D, out=self._total_D)

        found = self._read(replies, messages.Upload, self._t2, self._admitted, check)
        self._need(found, "uploads")
        self._uploads = {name: upload for name, (_, upload) in found.items()}
        committed = b"" if self._direction_D is None else direction.commitment(self._direction_D)
        uploads = messages.Uploads(tuple(signed for signed, _ in found.values()), committed)
        self._t3 = after_uploads(self._t2, uploads)
        self._next = self._collect_agreements
        return dict.fromkeys(found, self._request(uploads))

    def _collect_agreements(self, replies: Mapping[str, bytes]) -> Requests:
        agreed = self._quorum(replies, self._t3, self._uploads)
        self.is_spent = True  # sites open their sketches or commit next: there is no second session for these updates
        if self._terms.mode != SKETCH:
            self._choose(tuple(self._uploads))
            return dict.fromkeys(agreed, self._request(messages.Choice(self.included)))
        self._sketch = Sketch(
            digest(SketchSeed(self._t3)), self._terms.dimension, self._terms.buckets, self._direction_D
        )
        shown = b"" if self._direction_D is None else self._direction_D.tobytes()
        self._next = self._collect_sketches
        return dict.fromkeys(agreed, self._request(messages.Agreed(tuple(agreed.values()), shown)))

    def _quorum(self, replies: Mapping[str, bytes], transcript: bytes, asked: Iterable[str]) -> dict[str, Signed]:
        found = self._read(replies, messages.Agreement, transcript, asked)
        if len(found) < self._terms.quorum:
            raise RoundError(f"{len(found)} sites agree, {self._terms.quorum} are needed")
        self._agreed = tuple(found)
        return {name: signed for name, (signed, _) in found.items()}

    def _collect_sketches(self, replies: Mapping[str, bytes]) -> Requests:
        assert self._sketch is not None
        width = 4 * self._sketch.rows

        def check(name: str, report: messages.SketchReport, words: bytes) -> None:
            peers = [other for other in self._graph.neighbours(name) if other in self._admitted]
            if [mask.other for mask in report.masks] != peers:
                raise TrustError("it sketched other masks than its own")
            if any(len(sketched) != width for sketched in (report.own, *(mask.words for mask in report.masks))):
                raise TrustError("a sketch has the wrong size")

        found = self._read(replies, messages.SketchReport, self._t3, self._agreed, check)
        self._reports = {name: report for name, (_, report) in found.items()}
        self._sketches = {name: self._sketch_of(name) for name in self._reports}
        chosen = self._select(filters=True)
        try:
            check_choice(self._terms, self._uploads, chosen.included, self._past)
        except PrivacyError:  # sites would not sign another set of sites within this window
            filtered, chosen = chosen, self._select(filters=False)
            out = {name: why.reason for name, why in filtered.excluded.items()}
            self.unapplied = {name: reason for name, reason in out.items() if name not in chosen.excluded}
        self.held = chosen.held
        self.refusals += chosen.excluded.values()
        self._choose(chosen.included)
        return dict.fromkeys(self._reports, self._request(messages.Choice(self.included)))

    def _select(self, *, filters: bool) -> Selection:
        terms = self._terms
        silent = [name for name in self._uploads if name not in self._reports]
        if len(silent) > terms.exclusions:
            raise RoundError(f"{len(silent)} uploads have no sketch, at most {terms.exclusions} may be left out")
        try:
            return select(
                {name: self._in_units(name) for name in self._sketches},
                along=self._along(),
                clip_norm=terms.clip_norm,
                disputes=self._disputes(),
                budget=terms.exclusions - len(silent),
                minimum=terms.minimum_included,
                seed=self._t3,
                filters=filters,
            )
        except TooManyExcludedError as error:
            self.refusals += error.refusals.values()
            raise

    def _sketch_of(self, name: str) -> np.ndarray:
        """P of an update, from its masked words and what its site says of the masks; uint32 [rows]."""
        assert self._sketch is not None
        report = self._reports[name]
        words_K = self._sketch.apply(self._spool[name]) - np.frombuffer(report.own, "<u4")
        for mask in report.masks:
            said_K = np.frombuffer(mask.words, "<u4")
            words_K = words_K - said_K if masking.mask_sign(name, mask.other) > 0 else words_K + said_K
        return words_K

    def _in_units(self, name: str) -> np.ndarray:
        assert self._sketch is not None
        weight = self._terms.member(name).weight
        return as_floats(self._sketches[name][: self._sketch.hashed], scale=self._terms.ring.scale) / weight

    def _along(self) -> Along | None:
        """The updates along the server's direction, where there is one."""
        if self._direction_D is None:
            return None
        assert self._sketch is not None
        long = direction.length(self._direction_D)
        per_step = 1 / (self._terms.ring.scale * long)
        lengths = {
            name: int(words_K[-1:].view(np.int32)[0]) * per_step / self._terms.member(name).weight
            for name, words_K in self._sketches.items()
        }
        projected_K = self._sketch.apply(self._direction_D.astype(np.uint32))[: self._sketch.hashed]
        return Along(lengths, as_floats(projected_K, scale=long), self._terms.dimension)

    def _disputes(self) -> list[tuple[str, str]]:
        said = {(name, mask.other): mask.words for name, report in self._reports.items() for mask in report.masks}
        return [(a, b) for (a, b), words in said.items() if a < b and (b, a) in said and said[b, a] != words]

    # --- R4, R5: the choice, the sum

    def _choose(self, included: tuple[str, ...]) -> None:
        self._need(included, "choice")
        try:
            check_choice(self._terms, self._uploads, included, self._past)
        except PrivacyError as error:
            raise RoundError(f"the sites would not sign this choice: {error}") from error
        self.included = tuple(sorted(included))
        self._t4 = after_names(self._t3, self.included)
        self._next = self._collect_commitments

    def _collect_commitments(self, replies: Mapping[str, bytes]) -> Requests:
        asked = self._reports if self._terms.mode == SKETCH else self._agreed
        agreed = self._quorum(replies, self._t4, asked)
        self._next = self._collect_reveals
        return dict.fromkeys(agreed, self._request(messages.Agreed(tuple(agreed.values()))))

    def _collect_reveals(self, replies: Mapping[str, bytes]) -> Requests:
        def check(name: str, reveal: messages.Reveal, words: bytes) -> None:
            peers = [other for other in self._graph.holders(name) if other in self._admitted]
            if [revealed.dealer for revealed in reveal.shares] != peers:
                raise TrustError("it revealed other shares than it holds")

        found = self._read(replies, messages.Reveal, self._t4, self._agreed, check)
        self.result = self._open({name: reveal for name, (_, reveal) in found.items()})
        self._spool.clear()
        return {}

    def _open(self, reveals: Mapping[str, messages.Reveal]) -> Summed:
        terms, total_D = self._terms, self._total_D
        record = opening.Record(
            terms,
            self._graph,
            self._t1,
            self._t2,
            self._admitted,
            self.included,
            self._keys,
            self._shares,
            self._reports,
        )
        secrets = opening.open_secrets(record, reveals, self._blame)
        if terms.mode == SKETCH:
            for name in self.included:
                np.add(total_D, self._spool[name], out=total_D)
        opening.unmask(record, secrets, total_D, self._sketch, self._blame)
        if self._sketch is not None:
            said_K = sum((self._sketches[name] for name in self.included), np.zeros(self._sketch.rows, np.uint32))
            if not np.array_equal(self._sketch.apply(total_D), said_K):
                raise RoundError("the sketch of the sum is not the sum of the sketches")
        opening.check_sum(terms, self.included, total_D, self._sketch)
        weight = sum(terms.member(name).weight for name in self.included)
        return Summed(
            terms.ring.values(total_D) / weight,
            self.included,
            {name: self._uploads[name] for name in self.included},
        )
