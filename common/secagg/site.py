"""A site's side of one session: a request of the server in, a signed answer out.

No clock, file or network inside. An answer may carry what must be on disk before
it is sent. A request that is not the server's changes nothing; a request of the
server's that an honest one would not make ends the session and erases its secrets,
and the update's record says whether it may be sent in another.

A crash ends a session as well: its keys are in memory only, and no step is done twice.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning", against an active server, with sketches of the uploads (docs/leakage.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from common.errors import PrivacyError, RoundError, TrustError
from common.identity import SigningKey
from common.secagg import direction, limits, masking, messages, states
from common.secagg.context import SKETCH, SUM_ONLY, Terms, check_included, check_terms, compare
from common.secagg.encoding import decode, digest, encode
from common.secagg.graph import Graph, degree
from common.secagg.messages import SERVER, Signed, after_messages, after_names, after_uploads, say
from common.secagg.shares import ShareBook
from common.secagg.sketch import Sketch
from common.secagg.states import UpdateRecord
from common.update import PrivateUpdate

Entropy = Callable[[int], bytes]
"""Secret random bytes by their number: `os.urandom` outside of tests."""


class Stage(StrEnum):
    """What a site did last."""

    NOTHING = "nothing"
    GAVE_KEYS = "gave keys"
    DEALT = "dealt shares"
    CHECKED = "checked shares"
    UPLOADED = "uploaded"
    AGREED = "agreed on the uploads"
    SKETCHED = "opened its sketch"
    COMMITTED = "agreed on the choice"
    REVEALED = "revealed shares"
    ENDED = "ended"


EXPECTED = {
    Stage.NOTHING: frozenset({"Offer"}),
    Stage.GAVE_KEYS: frozenset({"Roll"}),
    Stage.DEALT: frozenset({"Deal"}),
    Stage.CHECKED: frozenset({"Defend", "Admitted"}),
    Stage.UPLOADED: frozenset({"Uploads"}),
    Stage.AGREED: frozenset({"Agreed", "Choice"}),
    Stage.SKETCHED: frozenset({"Choice"}),
    Stage.COMMITTED: frozenset({"Agreed"}),
    Stage.REVEALED: frozenset[str](),
    Stage.ENDED: frozenset[str](),
}
"""Requests a site answers at each stage."""


@dataclass(frozen=True)
class Answer:
    """Attributes:
    reply: bytes for the server.
    record: to be on disk before `reply` is sent; None for nothing new.
    words_D: rounded words to be on disk with it, so that a repetition sends the same.
    """

    reply: bytes
    record: UpdateRecord | None = None
    words_D: np.ndarray | None = None


@dataclass(frozen=True)
class Paid:
    """What the upload says about the charge: `SealedUpdate`'s ledger entry and head."""

    ledger_entry: str
    ledger_head: str


class SiteSession:
    """One site in one session. Whoever runs it keeps at most one alive: a new offer replaces the session before.

    Args:
        terms: derived by the site itself.
        server: the aggregator's raw Ed25519 key.
        update: what is to be summed; for the terms' plan.
        record: of this round, from disk; None for the first session.
        stored_words_D: as kept with the record; needed once the update was sent.
        history: records of the federation's other rounds.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        name: str,
        key: SigningKey,
        server: bytes,
        update: PrivateUpdate,
        paid: Paid,
        record: UpdateRecord | None,
        stored_words_D: np.ndarray | None,
        history: Sequence[UpdateRecord],
        entropy: Entropy,
    ) -> None:
        check_terms(terms)
        if terms.member(name).public != key.public:
            raise TrustError("the approved roster has another key for this site")
        if update.plan_digest != terms.plan_digest or len(update.delta_D) != terms.dimension:
            raise PrivacyError("the update was trained against another plan")
        stored = stored_words_D
        if stored is not None and (stored.dtype != terms.ring.dtype or len(stored) != terms.dimension):
            raise PrivacyError(
                f"the update was sent in words of other than {terms.word_bits} bits; this round is lost",
                public="the update was sent in words of another width",
            )
        self.stage = Stage.NOTHING
        self._terms, self._name, self._key, self._server = terms, name, key, server
        self._update_D, self._paid, self._entropy = update.delta_D, paid, entropy
        self._record = record or states.new_record(terms, update.delta_D)
        self._stored_words_D, self._history = stored_words_D, tuple(history)
        self._t0 = b""
        self._last: tuple[bytes, Answer] | None = None
        self._defended = False
        self._forget()

    @property
    def record(self) -> UpdateRecord:
        return self._record

    _shares: ShareBook
    _agreeing: masking.Agreeing

    def _forget(self) -> None:
        """Drop the session's secrets."""
        self._sharing = self._masking = self._self_secret = b""
        self._mask_keys: dict[str, bytes] = {}
        for name in ("_shares", "_agreeing"):
            self.__dict__.pop(name, None)

    def answer(self, request: bytes) -> Answer:
        """Answer one request.

        Raises:
            TrustError: it is not the server's, or not what an honest server would ask.
            PrivacyError: answering would break this site's limits.
            RoundError: the session does not expect it.
        """
        asked = hashlib.sha256(request).digest()
        if self._last is not None and self._last[0] == asked:
            return self._last[1]  # the answer was lost on the way
        signed = decode(Signed, request)
        body = self._open_request(signed)
        kind = signed.kind
        if kind not in EXPECTED[self.stage]:
            raise RoundError(f"{kind} after this site {self.stage}", public=f"the site does not answer {kind} now")
        try:
            answer = self._steps[kind](self, body)
        except BaseException:  # whatever it was, this session is over
            self.stage = Stage.ENDED
            self._last = None
            self._forget()
            raise
        if answer.record is not None:
            self._record = answer.record
        self._last = (asked, answer)
        return answer

    def _open_request(self, signed: Signed) -> Any:
        kinds = {kind.__name__: kind for kind in (messages.Offer, *_REQUESTS)}
        if signed.sender != SERVER or signed.kind not in kinds:
            raise TrustError("not a request of the server")
        transcript = bytes(32) if signed.kind == "Offer" else self._t0
        return signed.open(kinds[signed.kind], public=self._server, transcript=transcript)

    def _say(self, message: Any, transcript: bytes) -> Signed:
        return say(message, sender=self._name, transcript=transcript, key=self._key)

    def _reply(self, message: Any, transcript: bytes, words: bytes = b"") -> bytes:
        return encode(messages.Reply(self._say(message, transcript), words))

    # --- R0: keys

    def _give_keys(self, offer: messages.Offer) -> Answer:
        compare(self._terms, offer.terms)
        if len(offer.session) != 32:
            raise TrustError("a session has 32 bytes")
        limits.check_may_upload(self._terms, self._name, self._history)
        record = states.begin(self._record, self._terms, offer.session, self._update_D)
        self._sharing, self._masking = self._entropy(32), self._entropy(32)
        self._t0 = self._terms.context(offer.session)
        self._agreeing = masking.Agreeing(self._masking)
        self._keys = messages.Keys(masking.public_of(self._sharing), self._agreeing.public)
        self.stage = Stage.GAVE_KEYS
        return Answer(self._reply(self._keys, self._t0), record)

    # --- R1: shares

    def _deal(self, roll: messages.Roll) -> Answer:
        terms = self._terms
        keys: dict[str, messages.Keys] = {}
        for signed in roll.keys:
            opened = signed.open(messages.Keys, public=terms.member(signed.sender).public, transcript=self._t0)
            if signed.sender in keys or not (
                masking.contributes(opened.sharing) and masking.contributes(opened.masking)
            ):
                raise TrustError(f"{signed.sender} is listed twice, or its keys make no secret")
            keys[signed.sender] = opened
        if keys.get(self._name) != self._keys:
            raise TrustError("the list of keys does not hold the ones this site gave")
        if len({raw for each in keys.values() for raw in (each.sharing, each.masking)}) != 2 * len(keys):
            raise TrustError("two keys in the list are the same")
        check_included(terms, tuple(keys))
        self._t1 = after_messages(self._t0, roll.keys)
        size = degree(len(keys), colluders=terms.colluders, quorum=terms.quorum)
        self._graph = Graph(tuple(sorted(keys)), size, self._t1)
        self._peer_keys = {name: keys[name] for name in self._graph.holders(self._name)}
        self._shares = ShareBook(terms, self._name, self._t1, self._graph, self._sharing, self._peer_keys)
        self._self_secret = self._entropy(32)
        shares = self._shares.deal(self._self_secret, self._masking, self._entropy)
        self.stage = Stage.DEALT
        return Answer(self._reply(messages.Dealing(tuple(self._say(share, self._t1) for share in shares)), self._t1))

    # --- R1b: complaints

    def _check_shares(self, deal: messages.Deal) -> Answer:
        complaints = []
        for signed in deal.shares:
            public = self._terms.member(signed.sender).public
            share = signed.open(messages.Share, public=public, transcript=self._t1)
            if not self._shares.receive(signed.sender, share):
                complaints.append(signed.sender)
        self.stage = Stage.CHECKED
        return Answer(self._reply(messages.Verdict(tuple(sorted(complaints))), self._t1))

    def _publish(self, defend: messages.Defend) -> Answer:
        """Publish the shares of those who complain: they know them already, or lie."""
        complainers = set()
        for signed in defend.verdicts:
            public = self._terms.member(signed.sender).public
            verdict = signed.open(messages.Verdict, public=public, transcript=self._t1)
            if self._name not in verdict.complaints or signed.sender not in self._graph.neighbours(self._name):
                raise TrustError(f"{signed.sender} did not complain about a share of this site")
            complainers.add(signed.sender)
        possible = min(self._terms.colluders, self._graph.degree.share_threshold - 1)
        if self._defended or len(complainers) > possible:  # no honest site complains about an honest dealer
            raise TrustError("more complaints than liars are possible; no share is published")
        self._defended = True
        return Answer(self._reply(messages.Published(self._shares.publish(sorted(complainers))), self._t1))

    # --- R2: upload

    def _upload(self, admitted: messages.Admitted) -> Answer:
        terms, names = self._terms, admitted.names
        for signed in admitted.published:
            public = terms.member(signed.sender).public
            published = signed.open(messages.Published, public=public, transcript=self._t1)
            for opened in published.shares:
                if opened.holder == self._name:
                    self._shares.keep(signed.sender, opened.self_share, opened.key_share)
        neighbours = self._graph.neighbours(self._name)
        if len(set(names)) != len(names) or not set(names) <= set(self._graph.names) or self._name not in names:
            raise TrustError("the list of those admitted is not one of sites that gave keys, this one among them")
        if any(name in names and not self._shares.holds(name) for name in neighbours):
            raise TrustError("a site is admitted whose share this site does not hold")
        self._check_enough(names)
        self._admitted = tuple(sorted(names))
        self._t2 = after_names(self._t1, names)
        words_D = self._stored_words_D
        if words_D is None:
            weight = terms.member(self._name).weight
            words_D = terms.ring.quantise(self._update_D, weight=weight, key=self._entropy(32))
        record = states.upload(self._record, terms, words_D)
        self._shares.settle()
        masked_D = words_D.copy()
        masking.add_mask(masked_D, self._self_mask_key())
        for other in self._peers():
            masking.add_mask(masked_D, self._mask_key(other), sign=masking.mask_sign(self._name, other))
        words = masked_D.astype(masked_D.dtype.newbyteorder("<"), copy=False).tobytes()
        upload = messages.Upload(hashlib.sha256(words).digest(), self._paid.ledger_entry, self._paid.ledger_head)
        self._uploaded = upload
        del self._update_D, self._stored_words_D  # on disk before this is sent; a session sends once
        self.stage = Stage.UPLOADED
        return Answer(self._reply(upload, self._t2, words), record, words_D)

    def _check_enough(self, names: Sequence[str]) -> None:
        """So many sites, owners and neighbours that a sum over them hides each."""
        check_included(self._terms, names)
        near = len(set(names) & set(self._graph.neighbours(self._name)))
        if near < self._graph.degree.minimum_neighbours and self._name in names:
            raise TrustError(f"{near} neighbours are too few: at least {self._graph.degree.minimum_neighbours}")

    def _peers(self) -> list[str]:
        """Neighbours that were admitted: those with whom this site has a mask."""
        return [name for name in self._graph.neighbours(self._name) if name in self._admitted]

    def _self_mask_key(self) -> bytes:
        return masking.derive(self._self_secret, masking.KeyUse("self", self._t2, self._name, ""))

    def _mask_key(self, other: str) -> bytes:
        if other not in self._mask_keys:
            use = masking.mask_use(self._t2, self._name, other)
            self._mask_keys[other] = self._agreeing.key(self._peer_keys[other].masking, use)
        return self._mask_keys[other]

    # --- R3: agree on the uploads, then open a sketch of this one

    def _agree(self, uploads: messages.Uploads) -> Answer:
        terms = self._terms
        if uploads.direction and (not terms.directions or len(uploads.direction) != 32):
            raise TrustError("this site's updates are not looked at along a direction of the server's choice")
        found: dict[str, messages.Upload] = {}
        for signed in uploads.uploads:
            opened = signed.open(messages.Upload, public=terms.member(signed.sender).public, transcript=self._t2)
            if signed.sender in found or signed.sender not in self._admitted:
                raise TrustError(f"{signed.sender} is listed twice, or was not admitted")
            found[signed.sender] = opened
        if found.get(self._name) != self._uploaded:
            raise TrustError("the list of uploads does not hold this site's")
        self._check_enough(tuple(found))
        self._listed = tuple(sorted(found))
        self._direction = uploads.direction
        self._t3 = after_uploads(self._t2, uploads)
        self.stage = Stage.AGREED
        return Answer(self._reply(messages.Agreement(), self._t3))

    def _check_agreed(self, agreed: messages.Agreed, transcript: bytes) -> None:
        """A quorum of those who uploaded signed this very transcript; two quorums share an honest site."""
        signers = set()
        for signed in agreed.agreements:
            if signed.sender not in self._listed:
                raise TrustError(f"{signed.sender} did not upload and cannot agree")
            public = self._terms.member(signed.sender).public
            signed.open(messages.Agreement, public=public, transcript=transcript)
            signers.add(signed.sender)
        if len(signers) < self._terms.quorum:
            raise TrustError(f"{len(signers)} sites agree, {self._terms.quorum} are needed")

    def _after_agreement(self, agreed: messages.Agreed) -> Answer:
        return self._open_sketch(agreed) if self.stage is Stage.AGREED else self._reveal(agreed)

    def _open_sketch(self, agreed: messages.Agreed) -> Answer:
        terms = self._terms
        if terms.mode != SKETCH:
            raise TrustError(f"no sketch is opened in mode {terms.mode}")
        self._check_agreed(agreed, self._t3)
        chosen_D = None
        if self._direction:
            chosen_D = direction.read(agreed.direction, dimension=terms.dimension, committed=self._direction)
        elif agreed.direction:
            raise TrustError("the server shows a direction that it did not commit to")
        record = states.open_sketch(self._record, terms)
        sketch = Sketch(digest(SketchSeed(self._t3)), terms.dimension, terms.buckets, chosen_D)

        def projected(key: bytes) -> bytes:
            return sketch.apply(masking.mask(key, terms.dimension)).astype("<u4").tobytes()

        masks = tuple(messages.MaskSketch(other, projected(self._mask_key(other))) for other in self._peers())
        self.stage = Stage.SKETCHED
        return Answer(self._reply(messages.SketchReport(projected(self._self_mask_key()), masks), self._t3), record)

    # --- R4: commit to who is included

    def _commit_choice(self, choice: messages.Choice) -> Answer:
        terms, included = self._terms, choice.included
        if (terms.mode == SUM_ONLY) != (self.stage is Stage.AGREED):
            raise TrustError("nothing is chosen before the sketches are open")
        if len(set(included)) != len(included) or not set(included) <= set(self._listed):
            raise TrustError("the choice is not one of those who uploaded")
        self._check_enough(included)
        self._included = tuple(sorted(included))
        limits.check_choice(terms, self._listed, self._included, limits.past_sums(self._history))
        record = states.commit_to(self._record, self._included)
        self._t4 = after_names(self._t3, included)
        self.stage = Stage.COMMITTED
        return Answer(self._reply(messages.Agreement(), self._t4), record)

    # --- R5: reveal, of each peer one share and never both

    def _reveal(self, agreed: messages.Agreed) -> Answer:
        self._check_agreed(agreed, self._t4)
        dealers = sorted([*self._peers(), self._name])
        shares = tuple(self._shares.reveal(dealer, included=dealer in self._included) for dealer in dealers)
        reply = self._reply(messages.Reveal(shares), self._t4)
        self.stage = Stage.REVEALED
        self._forget()
        return Answer(reply)

    _steps: Mapping[str, Callable[[SiteSession, Any], Answer]] = {
        "Offer": _give_keys,
        "Roll": _deal,
        "Deal": _check_shares,
        "Defend": _publish,
        "Admitted": _upload,
        "Uploads": _agree,
        "Agreed": _after_agreement,
        "Choice": _commit_choice,
    }


@dataclass(frozen=True)
class SketchSeed:
    """What the map is drawn from: the transcript after the uploads were agreed on."""

    transcript: bytes


_REQUESTS = (
    messages.Roll,
    messages.Deal,
    messages.Defend,
    messages.Admitted,
    messages.Uploads,
    messages.Agreed,
    messages.Choice,
)
