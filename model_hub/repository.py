"""Published files: signed manifests, adapters as PEFT folders, and a signed channel.

    channel.json                              which version is stable, which is canary; signed
    versions/<id>/manifest.json, .sig         digest, parent, lineage
    versions/<id>/adapter_model.safetensors, adapter_config.json

The channel carries a sequence number that only grows; rolling back is a newer
channel that names an older version. Readers verify before they use anything.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from common.adapter import Adapter, LoraShape, parse_adapter, parse_tensors
from common.errors import TransportError, TrustError
from common.identity import SigningKey, canonical, replace_file, sha256_hex, verify
from model_hub.version import Lineage

MANIFEST_LABEL, CHANNEL_LABEL = "version-manifest", "channel"
_VERSION_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


@dataclass(frozen=True)
class Manifest:
    """What the hub signs about one version."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    parent: str | None
    digest: str
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    lineage: Lineage


@dataclass(frozen=True)
class Channel:
    """What sites should serve now."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sequence: int
    stable: str
    canary: str | None
    canary_share: float


_MANIFEST, _CHANNEL = TypeAdapter(Manifest), TypeAdapter(Channel)


class Repository:
    """The hub's side: writes, each file whole or not at all."""

    def __init__(self, folder: Path, key: SigningKey) -> None:
        self.folder = folder
        self._key = key
        (folder / "versions").mkdir(parents=True, exist_ok=True)

    def publish(self, version_id: str, adapter: Adapter, *, parent: str | None, lineage: Lineage, base: str) -> None:
        """Write a version; it becomes visible only complete, and is never rewritten."""
        target = self.folder / "versions" / _checked(version_id)
        if target.exists():
            raise TrustError(f"version {version_id} is published already and cannot change")
        partial = target.with_name(f".{version_id}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        adapter.write_peft_folder(partial, base_model=base)
        shape = adapter.shape
        manifest = Manifest(version_id, parent, adapter.digest, shape.rank, shape.alpha, shape.target_modules, lineage)
        payload = canonical(asdict(manifest))
        (partial / "manifest.json").write_bytes(payload)
        (partial / "manifest.sig").write_bytes(self._key.sign(MANIFEST_LABEL, payload))
        partial.replace(target)

    def sequence(self) -> int:
        """Sequence of the channel in force; 0 before the first."""
        if not (self.folder / "channel.json").exists():
            return 0
        return RepositoryReader(self.folder, hub_public=self._key.public).channel(at_least=0).sequence

    def adapter(self, version_id: str) -> Adapter:
        """A published adapter, verified against its own manifest."""
        folder = self.folder / "versions" / _checked(version_id)
        manifest = _verified_manifest(folder, version_id, self._key.public)
        data = _read(folder / "adapter_model.safetensors")
        if sha256_hex(data) != manifest.digest:
            raise TrustError(f"the published files of {version_id} were changed")
        return Adapter(LoraShape(manifest.rank, manifest.alpha, manifest.target_modules), parse_tensors(data))

    def point(self, channel: Channel) -> None:
        """Publish a channel newer than the last; one file, so that no reader sees half of it."""
        payload = canonical(asdict(channel))
        signed = canonical({"payload": payload.decode(), "signature": self._key.sign(CHANNEL_LABEL, payload).hex()})
        replace_file(self.folder / "channel.json", signed)


class RepositoryReader:
    """A site's side: reads, and believes only what the hub's key has signed."""

    def __init__(self, folder: Path, *, hub_public: bytes) -> None:
        self._folder = folder
        self._hub_public = hub_public

    def channel(self, *, at_least: int) -> Channel:
        """The channel in force.

        Args:
            at_least: sequence of the last channel this site adopted.

        Raises:
            TrustError: it is not signed by the hub, or older than one seen before.
            TransportError: it cannot be read now.
        """
        raw = _read(self._folder / "channel.json")
        try:
            signed = json.loads(raw)
            payload, signature = signed["payload"].encode(), bytes.fromhex(signed["signature"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrustError("the channel is malformed") from error
        verify(self._hub_public, CHANNEL_LABEL, payload, signature)  # (1) signed by the hub
        try:
            channel = _CHANNEL.validate_json(payload, strict=True)
        except ValidationError as error:
            raise TrustError("the channel is malformed") from error
        if channel.sequence < at_least:  # (2) never older than what was adopted
            raise TrustError(f"channel {channel.sequence} is older than {at_least}, which was adopted before")
        return channel

    def adapter(self, version_id: str, *, like: Adapter, base_digest: str) -> Adapter:
        """One version's adapter, verified.

        Raises:
            TrustError: manifest, digest, shape or base model do not hold.
        """
        folder = self._folder / "versions" / _checked(version_id)
        manifest = _verified_manifest(folder, version_id, self._hub_public)  # (1) signed, (2) this version
        if manifest.lineage.base_digest != base_digest:  # (3) for this base model
            raise TrustError(f"{version_id} belongs to another base model")
        if LoraShape(manifest.rank, manifest.alpha, manifest.target_modules) != like.shape:  # (4) shape
            raise TrustError(f"{version_id} has another LoRA shape")
        data = _read(folder / "adapter_model.safetensors")
        return parse_adapter(data, digest=manifest.digest, like=like)  # (5) bytes, names, dtype, finite


def _verified_manifest(folder: Path, version_id: str, hub_public: bytes) -> Manifest:
    payload = _read(folder / "manifest.json")
    verify(hub_public, MANIFEST_LABEL, payload, _read(folder / "manifest.sig"))
    try:
        manifest = _MANIFEST.validate_json(payload, strict=True)
    except ValidationError as error:
        raise TrustError(f"the manifest of {version_id} is malformed") from error
    if manifest.id != version_id:
        raise TrustError(f"the manifest of {version_id} names {manifest.id}")
    return manifest


def copy_version(source: Path, target: Path, version_id: str) -> None:
    """Copy a version's files as they were signed; whole or not at all. Raises OSError."""
    final = target / "versions" / _checked(version_id)
    if final.exists():
        return
    partial = final.with_name(f".{version_id}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source / "versions" / version_id, partial)
    partial.replace(final)


def copy_channel(channel: Channel, source: Path, target: Path) -> None:
    """Copy the signed channel, if it is still the one that was read. Raises OSError."""
    raw = (source / "channel.json").read_bytes()
    if json.loads(json.loads(raw)["payload"])["sequence"] == channel.sequence:
        replace_file(target / "channel.json", raw)


def _checked(version_id: str) -> str:
    """A version id is one plain path component, whoever sent it."""
    if not _VERSION_ID.fullmatch(version_id):
        raise TrustError(f"{version_id[:80]!r} is not a version id")
    return version_id


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TransportError(f"the hub has no readable {path.name}: {type(error).__name__}") from error
