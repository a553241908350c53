"""A federation in memory: real sessions on both sides, and hands that may change what passes between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.errors import HeadwaterError, RoundError
from common.identity import SigningKey
from common.plan import RoundPlan, Training
from common.secagg import Limits, Member, Paid, ServerSession, SiteSession, Summed, Terms, UpdateRecord, derive_terms
from common.secagg.encoding import decode, encode
from common.secagg.messages import Reply, Signed, say
from common.update import PrivateUpdate

LOOSE = Limits(distinct_sets=99, left_out=99, sketched_share=0.9)

Change = Callable[[str, bytes], bytes | None]
"""(site, bytes) to the bytes that arrive; None for silence."""


def new_key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


def make_plan(
    weights: Mapping[str, int], *, round: int = 1, clip_norm: float = 1.0, federation: str = "f"
) -> RoundPlan:
    return RoundPlan(
        federation=federation,
        round=round,
        planned_rounds=100,
        base_digest="0" * 64,
        adapter_version="v0",
        adapter_digest="1" * 64,
        training=Training("rft", "sgd", 1.0, 1, 0.5, 8.0, 1.0, {}),
        lora_phase="B",
        clip_norm=clip_norm,
        weights=dict(weights),
        roster_digest="2" * 64,
        sealing_key="3" * 64,
        deadline_s=1.0,
    )


@dataclass
class Disk:
    """What one site has written."""

    records: dict[int, UpdateRecord] = field(default_factory=dict)
    words: dict[int, np.ndarray] = field(default_factory=dict)


class Federation:
    """`n` sites called s01, s02, …, each its own organisation; updates have norms between half the clip and the clip."""

    def __init__(
        self,
        n: int,
        *,
        mode: str = "secagg_sketch",
        dimension: int = 12_000,
        weights: Mapping[str, int] | None = None,
        limits: Limits = LOOSE,
        seed: int = 0,
        word_bits: int = 32,
    ) -> None:
        self.names = tuple(f"s{i:02}" for i in range(1, n + 1))
        self.keys = {name: new_key() for name in self.names}
        self.server_key = new_key()
        self.weights = dict(weights or dict.fromkeys(self.names, 1))
        self.members = tuple(
            Member(name, self.keys[name].public, f"org-{name}", self.weights[name]) for name in self.names
        )
        self.mode, self.dimension, self.limits, self.word_bits = mode, dimension, limits, word_bits
        self.disks = {name: Disk() for name in self.names}
        self.rng = np.random.default_rng(seed)
        self.updates: dict[tuple[str, int], np.ndarray] = {}
        self.live: dict[str, SiteSession] = {}

    def terms(self, *, round: int = 1, mode: str | None = None, **changed: Any) -> Terms:
        terms = derive_terms(
            make_plan(self.weights, round=round),
            mode=mode or self.mode,
            members=self.members,
            dimension=self.dimension,
            snapshot="v0",
            limits=self.limits,
            word_bits=self.word_bits,
        )
        return replace(terms, **changed)

    def update(self, name: str, round: int = 1) -> np.ndarray:
        if (name, round) not in self.updates:
            drawn = self.rng.normal(size=self.dimension)
            drawn *= self.rng.uniform(0.5, 1.0) / np.linalg.norm(drawn)
            self.updates[name, round] = drawn.astype(np.float32)
        return self.updates[name, round]

    def site(self, name: str, terms: Terms | None = None, *, key: SigningKey | None = None) -> SiteSession:
        """A fresh session on what the site has on disk."""
        terms = terms or self.terms()
        disk, number = self.disks[name], terms.round
        session = SiteSession(
            terms,
            name=name,
            key=key or self.keys[name],
            server=self.server_key.public,
            update=PrivateUpdate(terms.plan_digest, {"x": (self.dimension,)}, self.update(name, number), "e" * 64),
            paid=Paid("e" * 64, ""),
            record=disk.records.get(number),
            stored_words_D=disk.words.get(number),
            history=[record for r, record in disk.records.items() if r != number],
            entropy=os.urandom,
        )
        self.live[name] = session
        return session

    def tell(self, name: str, request: bytes) -> bytes:
        """Let a site answer; what it must write is on its disk before the answer is seen."""
        session = self.live[name]
        answer = session.answer(request)
        if answer.words_D is not None:
            self.disks[name].words[answer.record.round] = answer.words_D.copy()  # type: ignore[union-attr]
        if answer.record is not None:
            self.disks[name].records[answer.record.round] = answer.record
        return answer.reply

    def server(self, terms: Terms | None = None, **options: Any) -> ServerSession:
        options = {"present": self.names, "session": os.urandom(32), "key": self.server_key, **options}
        return ServerSession(terms or self.terms(), **options)

    def state(self, name: str, round: int = 1) -> str:
        record = self.disks[name].records.get(round)
        return str(record.state) if record else "absent"

    def mean(self, included: Iterable[str], round: int = 1) -> np.ndarray:
        names = list(included)
        total = sum(self.weights[name] * self.update(name, round).astype(np.float64) for name in names)
        return total / sum(self.weights[name] for name in names)

    def rounding(self, included: Sequence[str]) -> float:
        """No coordinate of the mean is further from the floats' mean; with 16 bits, its norm is not."""
        weight = sum(self.weights[name] for name in included)
        coordinates = 1 if self.word_bits == 32 else self.dimension
        return 1.01 * self.terms().ring.rounding_norm(coordinates, len(included)) / weight + 1e-7


@dataclass
class Outcome:
    result: Summed | None
    void: str
    server: ServerSession
    refused_by_sites: dict[str, HeadwaterError]

    @property
    def guilty(self) -> set[str]:
        return set(self.server.guilty)


def run(
    federation: Federation,
    *,
    server: ServerSession | None = None,
    terms: Terms | None = None,
    to_site: Mapping[str, Change] | None = None,
    from_site: Mapping[str, Change] | None = None,
) -> Outcome:
    """One session to its end.

    Args:
        to_site: by the name of the request, what becomes of it on its way.
        from_site: by the name of the request, what becomes of the reply.
    """
    terms = terms or federation.terms()
    server = server or federation.server(terms)
    for name in federation.names:
        if name not in federation.live:
            federation.site(name, terms)
    requests, refused = server.start(), {}
    try:
        while requests:
            replies: dict[str, bytes] = {}
            for name, request in requests.items():
                kind = decode(Signed, request).kind
                seen = (to_site or {}).get(kind, lambda _, data: data)(name, request)
                if seen is None:
                    continue
                try:
                    reply: bytes | None = federation.tell(name, seen)
                except HeadwaterError as error:
                    refused[name] = error
                    continue
                assert reply is not None
                reply = (from_site or {}).get(kind, lambda _, data: data)(name, reply)
                if reply is not None:
                    replies[name] = reply
            requests = server.advance(replies)
        void = ""
    except RoundError as error:
        void = str(error)
    federation.live.clear()
    return Outcome(server.result, void, server, refused)


def silent(*names: str) -> Change:
    return lambda name, data: None if name in names else data


def resigned(federation: Federation, kind: type, edit: Callable[[str, Any], Any], *names: str) -> Change:
    """Liars: the sites of `names` say something else than their session did, and sign it."""

    def change(name: str, data: bytes) -> bytes:
        if name not in names:
            return data
        reply = decode(Reply, data)
        message = decode(kind, reply.signed.body)
        said = say(edit(name, message), sender=name, transcript=reply.signed.transcript, key=federation.keys[name])
        return encode(Reply(said, reply.words))

    return change


def served(federation: Federation, kind: type, edit: Callable[[str, Any], Any], *names: str) -> Change:
    """A lying server: the sites of `names` are shown something else, signed by it."""

    def change(name: str, data: bytes) -> bytes:
        if names and name not in names:
            return data
        signed = decode(Signed, data)
        message = edit(name, decode(kind, signed.body))
        return encode(say(message, sender="", transcript=signed.transcript, key=federation.server_key))

    return change


def drive(federation: Federation, server: ServerSession, until: str, *, nth: int = 1) -> dict[str, bytes]:
    """Run an honest session until its requests are the `nth` of a kind; these, not yet given to anyone."""
    for name in federation.names:
        if name not in federation.live:
            federation.site(name, server._terms)
    requests, seen = server.start(), 0
    while True:
        kind = decode(Signed, next(iter(requests.values()))).kind
        seen += kind == until
        if seen == nth:
            return requests
        requests = server.advance({name: federation.tell(name, request) for name, request in requests.items()})


def opened(federation: Federation, kind: type, data: bytes) -> Any:
    """The body of a request or of a reply, whoever said it."""
    try:
        signed = decode(Reply, data).signed
    except HeadwaterError:
        signed = decode(Signed, data)
    return decode(kind, signed.body)


def asked(federation: Federation, message: Any, like: bytes) -> bytes:
    """A request by the server, in the session of another one of its requests."""
    return encode(say(message, sender="", transcript=decode(Signed, like).transcript, key=federation.server_key))
