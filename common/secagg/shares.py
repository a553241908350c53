"""The shares one site deals of its two secrets, and those it holds of its neighbours'.

A dealer signs a commitment to every share it deals, so a holder can tell a false
share from the dealer's, and the server a false share from the holder's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.errors import TrustError
from common.secagg import masking, messages, shamir
from common.secagg.context import Terms
from common.secagg.graph import Graph
from common.secagg.messages import Share, commit


@dataclass(eq=False)
class ShareBook:
    """One site's shares in one session.

    Attributes:
        transcript: T1, with all keys in it.
        sharing: this site's private X25519 key for shares.
        others: keys of this site and its neighbours by name.
    """

    terms: Terms
    name: str
    transcript: bytes
    graph: Graph
    sharing: bytes
    others: dict[str, messages.Keys]
    _dealt: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _held: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _received: dict[str, Share] = field(default_factory=dict, repr=False)
    _secrets: dict[str, bytes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._agreeing = masking.Agreeing(self.sharing)

    def deal(self, self_secret: bytes, key_secret: bytes, entropy: Callable[[int], bytes]) -> list[Share]:
        """Split both secrets among the holders; this site keeps its own share."""
        holders = self.graph.holders(self.name)
        points = {holder: self.terms.point(holder) for holder in holders}
        threshold = self.graph.degree.share_threshold
        of_self, of_key = (
            shamir.split(secret, threshold=threshold, points=list(points.values()), entropy=entropy)
            for secret in (self_secret, key_secret)
        )
        self._dealt = {holder: (of_self[point], of_key[point]) for holder, point in points.items()}
        self._held[self.name] = self._dealt[self.name]
        commitment = self._commit(self.name, "", "self", self_secret)
        return [self._share(holder, commitment) for holder in holders]

    def _share(self, holder: str, self_secret: bytes) -> Share:
        one, two = self._dealt[holder]
        ciphertext = b""
        if holder != self.name:
            ciphertext = masking.lock(self._key(self.name, holder), one + two, context=self.transcript)
        return Share(
            holder,
            self_secret,
            self._commit(self.name, holder, "self", one),
            self._commit(self.name, holder, "key", two),
            ciphertext,
        )

    def receive(self, dealer: str, share: Share) -> bool:
        """Open a neighbour's share and keep it; False where it is not what the neighbour committed to."""
        if dealer not in self.graph.neighbours(self.name) or dealer in self._received or share.holder != self.name:
            raise TrustError(f"a share of {dealer} is not for this site")
        self._received[dealer] = share
        plain = masking.unlock(self._key(dealer, self.name), share.ciphertext, context=self.transcript)
        return plain is not None and self.keep(dealer, plain[: shamir.SHARE_BYTES], plain[shamir.SHARE_BYTES :])

    def keep(self, dealer: str, self_share: bytes, key_share: bytes) -> bool:
        """Keep opened shares where they are what the dealer committed to."""
        share = self._received.get(dealer)
        if share is None or not opens(self.transcript, dealer, share, self_share, key_share):
            return False
        self._held[dealer] = (self_share, key_share)
        return True

    def publish(self, holders: Iterable[str]) -> tuple[messages.OpenShare, ...]:
        return tuple(messages.OpenShare(holder, *self._dealt[holder]) for holder in holders)

    def settle(self) -> None:
        """Nobody complains any more: forget what this site dealt, and all it does not have to reveal."""
        self._dealt.clear()
        self._received.clear()
        self._secrets.clear()

    def holds(self, dealer: str) -> bool:
        return dealer in self._held

    def reveal(self, dealer: str, *, included: bool) -> messages.Revealed:
        """The share of the self secret of who is included, of the masking key of who is not: never both."""
        self_share, key_share = self._held[dealer]
        return messages.Revealed(dealer, self_share if included else key_share)

    def _key(self, dealer: str, holder: str) -> bytes:
        other = holder if dealer == self.name else dealer
        if other not in self._secrets:  # one for both directions; their keys differ by who deals
            self._secrets[other] = self._agreeing.secret(self.others[other].sharing)
        return masking.derive(self._secrets[other], masking.KeyUse("share", self.transcript, dealer, holder))

    def _commit(self, dealer: str, holder: str, which: str, secret: bytes) -> bytes:
        return commit(self.transcript, dealer=dealer, holder=holder, which=which, secret=secret)


def opens(transcript: bytes, dealer: str, share: Share, self_share: bytes, key_share: bytes) -> bool:
    """Whether these are the two shares that a dealer committed to."""
    return opens_self(transcript, dealer, share, self_share) and opens_key(transcript, dealer, share, key_share)


def opens_self(transcript: bytes, dealer: str, share: Share, opened: bytes) -> bool:
    """Whether this is the share of the dealer's self secret that it committed to, and a share at all."""
    return (
        shamir.is_share(opened)
        and commit(transcript, dealer=dealer, holder=share.holder, which="self", secret=opened) == share.self_share
    )


def opens_key(transcript: bytes, dealer: str, share: Share, opened: bytes) -> bool:
    """Whether this is the share of the dealer's masking key that it committed to, and a share at all."""
    return (
        shamir.is_share(opened)
        and commit(transcript, dealer=dealer, holder=share.holder, which="key", secret=opened) == share.key_share
    )
