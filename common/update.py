"""All that may leave a site: private updates, sealed; and what a round makes of them.

A `PrivateUpdate` comes out of the private step and nowhere else; sealing takes
only that type. The receiving side opens and checks everything about an update
before it does arithmetic with it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save

from common.adapter import check_tensors, parse_tensors
from common.errors import PrivacyError, RoundError, TrustError
from common.identity import SealingKey, SigningKey, canonical, seal, sha256_hex, verify
from common.plan import RoundPlan

LABEL = "sealed-update"
HEAD_LABEL = "ledger-head"
NOT_CHARGED = "unsafe-no-dp"
"""Ledger entry of an update that was made without noise."""

UNFINISHED = {"unfinished": True}
"""What a site that is still training says instead of an update."""

NORM_TOLERANCE = 1.05
"""An update may exceed the plan's clip by rounding, not by more."""

_LEDGER_HEAD = re.compile(r"(0|[1-9][0-9]{0,15}) ([0-9a-f]{64}) ([0-9a-f]{128})")
_LEDGER_ENTRY = re.compile(rf"[0-9a-f]{{64}}|{NOT_CHARGED}")
_HEADER_ALLOWANCE_BYTES = 512
"""Room per tensor for its name in the safetensors header, and for HPKE's own bytes."""


@dataclass(frozen=True, eq=False)
class PrivateUpdate:
    """One site's change of the adapter for one plan; (ε, δ)-private by the charge it names.

    Attributes:
        plan_digest: the plan it was trained against.
        shapes: of the phase's tensors by PEFT name, sorted.
        delta_D: flat float32, in the order of `shapes`; L2 norm at most the plan's clip.
        ledger_entry: digest of the ledger row that paid for it.
    """

    plan_digest: str
    shapes: Mapping[str, tuple[int, ...]]
    delta_D: np.ndarray
    ledger_entry: str

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.delta_D.astype(np.float64)))

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Views of the parts by name."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        parts = np.split(self.delta_D, ends[:-1])
        return {n: part.reshape(shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}

    @property
    def file_bytes(self) -> bytes:
        """As a safetensors file: names, shapes and dtype travel with the values."""
        return save(self.tensors)


@dataclass(frozen=True)
class LedgerHead:
    """The last row of a site's privacy ledger, signed by the site.

    The aggregator keeps it and shows it with its next request: a witness outside the
    site that this row was written.

    Attributes:
        sequence: rows up to and with this one; 0 for an empty ledger.
        digest: of the row, which chains all before it.
    """

    sequence: int
    digest: str
    signature: bytes

    @staticmethod
    def signed(sequence: int, digest: str, key: SigningKey) -> LedgerHead:
        return LedgerHead(sequence, digest, key.sign(HEAD_LABEL, f"{sequence} {digest}".encode()))

    @staticmethod
    def parse(text: str) -> LedgerHead:
        """Read `encode`'s text; raises TrustError where it is anything else."""
        found = _LEDGER_HEAD.fullmatch(text)
        if found is None:
            raise TrustError("not the head of a privacy ledger")
        return LedgerHead(int(found[1]), found[2], bytes.fromhex(found[3]))

    def encode(self) -> str:
        """`sequence digest signature`, the latter two in hexadecimal."""
        return f"{self.sequence} {self.digest} {self.signature.hex()}"

    def verify(self, public: bytes) -> None:
        """Raise TrustError unless the site with this public key signed it."""
        verify(public, HEAD_LABEL, f"{self.sequence} {self.digest}".encode(), self.signature)


@dataclass(frozen=True)
class SealedUpdate:
    """A `PrivateUpdate` encrypted to the aggregator and signed by its site.

    Attributes:
        ledger_head: `LedgerHead.encode` of the site's ledger, with the charge in it; empty where nothing was charged.
    """

    site: str
    plan_digest: str
    ledger_entry: str
    ledger_head: str
    ciphertext: bytes
    signature: bytes

    def signed_payload(self) -> bytes:
        return canonical(
            {
                "site": self.site,
                "plan": self.plan_digest,
                "ledger_entry": self.ledger_entry,
                "ledger_head": self.ledger_head,
                "ciphertext": sha256_hex(self.ciphertext),
            }
        )


@dataclass(frozen=True)
class Refusal:
    """Why one site's part of a round was not used."""

    site: str
    stage: str
    reason: str


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The combined change of one round, flat float32 in the order of sorted PEFT names."""

    plan_digest: str
    delta_D: np.ndarray
    participants: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    rule: str


@dataclass(frozen=True)
class Voided:
    """A round that ended without a result, and why."""

    plan_digest: str
    reason: str
    refusals: tuple[Refusal, ...]


def seal_update(
    update: PrivateUpdate, plan: RoundPlan, *, site: str, key: SigningKey, ledger_head: str
) -> SealedUpdate:
    """Encrypt an update to the plan's aggregator and sign it, with the encoded head of the ledger that paid for it.

    Raises:
        PrivacyError: the update belongs to another plan or exceeds its clip norm.
    """
    if update.plan_digest != plan.digest:
        raise PrivacyError("this update was trained against another plan; it is not sealed")
    if not update.norm <= plan.clip_norm * NORM_TOLERANCE:
        raise PrivacyError(f"update norm {update.norm:.3g} exceeds the plan's clip {plan.clip_norm}")
    return seal_bytes(
        update.file_bytes, plan, site=site, key=key, ledger_entry=update.ledger_entry, ledger_head=ledger_head
    )


def seal_bytes(
    payload: bytes, plan: RoundPlan, *, site: str, key: SigningKey, ledger_entry: str, ledger_head: str
) -> SealedUpdate:
    """The unchecked half of `seal_update`; attack drills use it to send what no honest site would."""
    ciphertext = seal(payload, recipient=bytes.fromhex(plan.sealing_key), context=_context(plan.digest, site))
    unsigned = SealedUpdate(site, plan.digest, ledger_entry, ledger_head, ciphertext, b"")
    return dataclasses.replace(unsigned, signature=key.sign(LABEL, unsigned.signed_payload()))


def open_update(
    sealed: SealedUpdate,
    plan: RoundPlan,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    site_public: bytes,
    key: SealingKey,
) -> np.ndarray:
    """Verify, decrypt and check one update; the flat float32 vector in the order of `shapes`.

    Raises:
        RoundError: anything about it is wrong; the message says what, without its values.
    """
    try:
        if sealed.plan_digest != plan.digest:  # (1) this round
            raise TrustError("it was made for another plan")
        if not _LEDGER_ENTRY.fullmatch(sealed.ledger_entry):
            raise TrustError("it names no ledger entry")
        _check_head(sealed, site_public)  # (2) a ledger of this site
        size = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
        limit = size + _HEADER_ALLOWANCE_BYTES * (len(shapes) + 1)
        if len(sealed.ciphertext) > limit:  # (3) size, before anything is allocated
            raise TrustError(f"it has {len(sealed.ciphertext)} bytes, expected at most {limit}")
        verify(site_public, LABEL, sealed.signed_payload(), sealed.signature)  # (4) this site
        payload = key.open(sealed.ciphertext, context=_context(plan.digest, sealed.site))
        tensors = parse_tensors(payload)
        check_tensors(tensors, shapes)  # (5) names, dtype, shapes, finite
        delta_D = np.concatenate([tensors[name].reshape(-1) for name in shapes])
        norm = float(np.linalg.norm(delta_D.astype(np.float64)))
        if not norm <= plan.clip_norm * NORM_TOLERANCE:  # (6) norm
            raise TrustError(f"norm {norm:.3g} exceeds the plan's clip {plan.clip_norm:.3g}")
    except TrustError as error:
        raise RoundError(str(error)) from error
    return delta_D


def _check_head(sealed: SealedUpdate, site_public: bytes) -> None:
    if sealed.ledger_entry == NOT_CHARGED:
        if sealed.ledger_head:
            raise TrustError("it was not charged and shows a ledger")
        return
    LedgerHead.parse(sealed.ledger_head).verify(site_public)


def _context(plan_digest: str, site: str) -> bytes:
    return f"headwater/{LABEL}/{plan_digest}/{site}".encode()
