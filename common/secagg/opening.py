"""The last step on the server: secrets from shares, masks from secrets, the sum from masks.

Blame comes from signed contradictions only, in this order, so that nobody is blamed
for what another did:

1. a revealed share that is not what its dealer committed to: the holder lied;
2. a secret, put together from committed shares, that is not the committed one: the dealer lied;
3. a reported sketch that is not that of the mask: the reporter lied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from common.errors import RoundError
from common.secagg import masking, messages, shamir
from common.secagg.context import Terms
from common.secagg.graph import Graph
from common.secagg.messages import commit
from common.secagg.shares import opens_key, opens_self
from common.secagg.sketch import Sketch, as_floats

RATIO = (0.75, 1.25)
"""Limits of |sum| / |P sum|: eight standard deviations of a sketch of 512 rows."""

Blame = Callable[[str, str], None]


@dataclass(frozen=True)
class Record:
    """What the server holds of a session when the shares come in.

    Attributes:
        shares: each dealer's signed `Share`s by holder.
        keys: by site.
        reports: sketches by site; empty in a session without.
    """

    terms: Terms
    graph: Graph
    t1: bytes
    t2: bytes
    admitted: tuple[str, ...]
    included: tuple[str, ...]
    keys: Mapping[str, messages.Keys]
    shares: Mapping[str, Mapping[str, messages.Share]]
    reports: Mapping[str, messages.SketchReport]

    def left_out(self) -> list[str]:
        """Admitted sites outside the sum that share a mask with one inside."""
        inside = set(self.included)
        outside = [name for name in self.admitted if name not in inside]
        return [name for name in outside if inside & set(self.graph.neighbours(name))]

    def pairs(self, name: str) -> list[str]:
        """Included neighbours of a site that is left out."""
        return [other for other in self.graph.neighbours(name) if other in self.included]


@dataclass
class Secrets:
    """Opened secrets: of included sites the self secret, of those left out the masking key."""

    self_secrets: dict[str, bytes] = field(default_factory=dict)
    masking_keys: dict[str, bytes] = field(default_factory=dict)


def open_secrets(record: Record, reveals: Mapping[str, messages.Reveal], blame: Blame) -> Secrets:
    """Put the secrets together from the shares that open.

    Raises:
        RoundError: too few shares of a secret, or a dealer that lied about one.
    """
    valid: dict[str, dict[int, bytes]] = {}
    for holder, reveal in sorted(reveals.items()):
        for revealed in reveal.shares:
            share = record.shares[revealed.dealer][holder]
            check = opens_self if revealed.dealer in record.included else opens_key
            if check(record.t1, revealed.dealer, share, revealed.share):
                valid.setdefault(revealed.dealer, {})[record.terms.point(holder)] = revealed.share
            else:  # (1)
                blame(holder, f"its share of {revealed.dealer}'s secret is not the one it was dealt")
    secrets, liars = Secrets(), []
    for dealer in [*record.included, *record.left_out()]:
        shares = valid.get(dealer, {})
        if len(shares) < record.graph.degree.share_threshold:
            raise RoundError(f"{len(shares)} shares of {dealer}'s secret are too few")
        secret = shamir.combine(shares, threshold=record.graph.degree.share_threshold)
        if secret is None or not _is_committed(record, dealer, secret):  # (2)
            blame(dealer, "the shares it dealt are not those of the secret it committed to")
            liars.append(dealer)
        elif dealer in record.included:
            secrets.self_secrets[dealer] = secret
        else:
            secrets.masking_keys[dealer] = secret
    if liars:
        raise RoundError(f"the masks of {', '.join(liars)} cannot be taken away")
    return secrets


def _is_committed(record: Record, dealer: str, secret: bytes) -> bool:
    if dealer not in record.included:
        return masking.public_of(secret) == record.keys[dealer].masking
    committed = record.shares[dealer][dealer].self_secret
    return commit(record.t1, dealer=dealer, holder="", which="self", secret=secret) == committed


def unmask(record: Record, secrets: Secrets, total_D: np.ndarray, sketch: Sketch | None, blame: Blame) -> None:
    """Take all masks out of the sum of the included uploads, in place.

    Raises:
        RoundError: a mask was sketched falsely, so the choice rested on a lie.
    """
    liars: set[str] = set()
    for name, secret in secrets.self_secrets.items():
        key = masking.derive(secret, masking.KeyUse("self", record.t2, name, ""))
        projected = _take_away(total_D, key, 1, sketch)
        if sketch is not None and projected != record.reports[name].own:  # (3)
            blame(name, "it reported a false sketch of its own mask")
            liars.add(name)
    for name, secret in secrets.masking_keys.items():
        agreeing = masking.Agreeing(secret)
        for other in record.pairs(name):
            key = agreeing.key(record.keys[other].masking, masking.mask_use(record.t2, name, other))
            projected = _take_away(total_D, key, masking.mask_sign(other, name), sketch)
            for reporter, partner in ((name, other), (other, name)):
                report = record.reports.get(reporter)
                if sketch is not None and report is not None and projected != _reported(report, partner):  # (3)
                    blame(reporter, f"it reported a false sketch of the mask it shares with {partner}")
                    liars.add(reporter)
    if liars:
        raise RoundError(f"the sketches of {', '.join(sorted(liars))} were false; the choice rested on them")


def _take_away(total_D: np.ndarray, key: bytes, sign: int, sketch: Sketch | None) -> bytes:
    """Subtract a mask that was added with `sign`; its sketch, where there is one."""
    if sketch is None:
        masking.add_mask(total_D, key, sign=-sign)
        return b""
    mask_D = masking.mask(key, len(total_D))
    (np.subtract if sign > 0 else np.add)(total_D, mask_D, out=total_D)
    return sketch.apply(mask_D).astype("<u4").tobytes()


def _reported(report: messages.SketchReport, other: str) -> bytes:
    return next((mask.words for mask in report.masks if mask.other == other), b"")


def check_sum(terms: Terms, included: Iterable[str], total_D: np.ndarray, sketch: Sketch | None) -> None:
    """Raise RoundError where the sum is longer than its sites may make it, or than its sketch says.

    A site that wrote anything at all into the ring is caught here or in the sketch; without sketches nobody is named.
    """
    names = tuple(included)
    norm = terms.ring.norm(total_D)
    bound = terms.clip_norm * sum(terms.member(name).weight for name in names)
    slack = terms.ring.rounding_norm(terms.dimension, len(names))
    if not norm <= 1.001 * bound + slack:
        raise RoundError(f"the sum's norm {norm:.3g} is above the {bound:.3g} that {len(names)} clipped updates allow")
    if sketch is not None:
        hashed_K = sketch.apply(total_D)[: sketch.hashed]
        projected = float(np.linalg.norm(as_floats(hashed_K, scale=terms.ring.scale)))
        if not RATIO[0] * projected <= norm <= RATIO[1] * projected:
            raise RoundError(f"the sum's norm {norm:.3g} is not the {projected:.3g} that its sketch shows")
