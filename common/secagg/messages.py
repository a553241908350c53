"""What the parties of a session say to each other, and what each signature covers.

Every message travels as a `Signed`: its body, who says it, and the transcript it was
said under. The transcript is a hash over everything agreed on so far, so a site
that was shown something else cannot produce a signature that others accept:

    T0 = context of terms and session      keys are signed under it
    T1 = H(T0, all keys)                   shares and complaints
    T2 = H(T1, who dealt and checked)      uploads
    T3 = H(T2, all uploads' digests, the   agreement on the list, sketches
           server's direction)
    T4 = H(T3, who is included)            agreement on the choice, reveals
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import TrustError
from common.identity import SigningKey, verify
from common.secagg.context import Terms
from common.secagg.encoding import decode, digest, encode, kind_of

T = TypeVar("T")

LABEL = "secagg"
SERVER = ""
"""The server's name among the senders; no site has it."""


@dataclass(frozen=True)
class Signed:
    """A message by a party. Attributes: `transcript` is what its sender had agreed to before."""

    sender: str
    transcript: bytes
    body: bytes
    signature: bytes

    def open(self, kind: type[T], *, public: bytes, transcript: bytes) -> T:
        """The body, if the owner of `public` signed it as a `kind` under this transcript; else TrustError."""
        if self.transcript != transcript:
            raise TrustError(f"{self.sender or 'the server'} speaks under another transcript")
        statement = _Statement(self.sender, self.transcript, hashlib.sha256(self.body).digest())
        verify(public, LABEL, encode(statement), self.signature)
        return decode(kind, self.body)

    @property
    def kind(self) -> str:
        return kind_of(self.body)


@dataclass(frozen=True)
class _Statement:
    sender: str
    transcript: bytes
    body_sha256: bytes


def say(message: Any, *, sender: str, transcript: bytes, key: SigningKey) -> Signed:
    """Sign a message."""
    body = encode(message)
    statement = _Statement(sender, transcript, hashlib.sha256(body).digest())
    return Signed(sender, transcript, body, key.sign(LABEL, encode(statement)))


# --- the server's


@dataclass(frozen=True)
class Ready:
    """Asks whether a site's update is there and could be summed on these terms.

    Not signed, and no session begins with it: a site only compares the terms with its own.
    """

    terms: Terms


@dataclass(frozen=True)
class Offer:
    """Opens a session; `session` is 32 random bytes."""

    terms: Terms
    session: bytes


@dataclass(frozen=True)
class Roll:
    """All sites' `Keys`."""

    keys: tuple[Signed, ...]


@dataclass(frozen=True)
class Deal:
    """The `Share`s for one site."""

    shares: tuple[Signed, ...]


@dataclass(frozen=True)
class Defend:
    """`Verdict`s that complain about one dealer."""

    verdicts: tuple[Signed, ...]


@dataclass(frozen=True)
class Admitted:
    """Who may upload, and the `Published` shares of those about whom this site complained."""

    names: tuple[str, ...]
    published: tuple[Signed, ...]


@dataclass(frozen=True)
class Uploads:
    """All `Upload`s, without their words, and SHA-256 of the server's direction; empty for none."""

    uploads: tuple[Signed, ...]
    direction: bytes = b""


@dataclass(frozen=True)
class Agreed:
    """`Agreement`s of a quorum: on the uploads, with the direction that was committed to; then on the choice."""

    agreements: tuple[Signed, ...]
    direction: bytes = b""


@dataclass(frozen=True)
class Choice:
    """Who is included in the sum."""

    included: tuple[str, ...]


# --- a site's


@dataclass(frozen=True)
class Keys:
    """Two raw X25519 keys of this session: `sharing` for shares, `masking` for masks."""

    sharing: bytes
    masking: bytes


@dataclass(frozen=True)
class Share:
    """One holder's shares of a dealer's two secrets, and commitments to them.

    Attributes:
        self_secret: SHA-256 of the dealer's secret b; its other secret is committed to by its masking key.
        self_share, key_share: commitments to the holder's share of each.
        ciphertext: both shares, to the holder alone; empty for the dealer's own.
    """

    holder: str
    self_secret: bytes
    self_share: bytes
    key_share: bytes
    ciphertext: bytes


@dataclass(frozen=True)
class Dealing:
    """A dealer's `Share`s, one for every holder."""

    shares: tuple[Signed, ...]


@dataclass(frozen=True)
class Verdict:
    """Dealers whose share does not open or is not what they committed to."""

    complaints: tuple[str, ...]


@dataclass(frozen=True)
class OpenShare:
    holder: str
    self_share: bytes
    key_share: bytes


@dataclass(frozen=True)
class Published:
    """The shares of those who complained, for all to see: they knew them already, or lie."""

    shares: tuple[OpenShare, ...]


@dataclass(frozen=True)
class Upload:
    """A masked update's digest, and the ledger that paid for the update."""

    words_sha256: bytes
    ledger_entry: str
    ledger_head: str


@dataclass(frozen=True)
class Agreement:
    """Nothing but a signature under the new transcript."""


@dataclass(frozen=True)
class MaskSketch:
    """P of the mask that the sender has with `other`, as little-endian words."""

    other: str
    words: bytes


@dataclass(frozen=True)
class SketchReport:
    """P of the sender's own mask and of those it has with its neighbours."""

    own: bytes
    masks: tuple[MaskSketch, ...]


@dataclass(frozen=True)
class Revealed:
    """A share of `dealer`'s self secret where it is included, of its masking key where it is not."""

    dealer: str
    share: bytes


@dataclass(frozen=True)
class Reveal:
    shares: tuple[Revealed, ...]


@dataclass(frozen=True)
class Reply:
    """A site's answer; `words` holds an upload's masked words and is empty otherwise."""

    signed: Signed
    words: bytes


# --- transcripts


@dataclass(frozen=True)
class _Entry:
    sender: str
    body: bytes


@dataclass(frozen=True)
class _Heard:
    before: bytes
    entries: tuple[_Entry, ...]


@dataclass(frozen=True)
class _Named:
    before: bytes
    names: tuple[str, ...]


def after_messages(before: bytes, messages: Iterable[Signed]) -> bytes:
    """The transcript with these messages in it, by sender."""
    entries = sorted((message.sender, message.body) for message in messages)
    return digest(_Heard(before, tuple(_Entry(sender, body) for sender, body in entries)))


def after_names(before: bytes, names: Iterable[str]) -> bytes:
    """The transcript with this set of sites in it."""
    return digest(_Named(before, tuple(sorted(names))))


@dataclass(frozen=True)
class _Listed:
    before: bytes
    direction: bytes


def after_uploads(before: bytes, uploads: Uploads) -> bytes:
    """The transcript with the uploads in it, and what the server committed to."""
    return digest(_Listed(after_messages(before, uploads.uploads), uploads.direction))


@dataclass(frozen=True)
class _Commitment:
    transcript: bytes
    dealer: str
    holder: str
    which: str
    secret: bytes


def commit(transcript: bytes, *, dealer: str, holder: str, which: str, secret: bytes) -> bytes:
    """SHA-256 commitment to a secret of high entropy; `which` is `self` or `key`, `holder` empty for the secret."""
    return digest(_Commitment(transcript, dealer, holder, which, secret))
