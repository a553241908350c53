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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from common.adapter import Adapter, LoraShape, parse_adapter, parse_tensors
from common.errors import TransportError, TrustError
from common.identity import SigningKey, canonical, replace_file, sha256_hex, verify
from model_hub.version import Lineage

MANIFEST_LABEL, CHANNEL_LABEL = "version-manifest", "channel"
SIGNED_FILES = ("manifest.json", "manifest.sig", "adapter_model.safetensors")
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

    def channel(self) -> Channel | None:
        """The channel in force, verified; None before the first."""
        if not (self.folder / "channel.json").exists():
            return None
        return RepositoryReader(self.folder, hub_public=self._key.public).channel(at_least=0)

    def forget_all_but(self, known: set[str]) -> None:
        """Remove versions whose publication was never finished."""
        for folder in (self.folder / "versions").iterdir():
            if folder.name not in known:
                shutil.rmtree(folder)

    def adapter(self, version_id: str) -> Adapter:
        """A published adapter, verified against its own manifest."""
        folder = self.folder / "versions" / _checked(version_id)
        files = {name: _read(folder / name) for name in SIGNED_FILES}
        manifest = _parse_manifest(files, version_id, self._key.public)
        data = files["adapter_model.safetensors"]
        if sha256_hex(data) != manifest.digest:
            raise TrustError(f"the published files of {version_id} were changed")
        return Adapter(LoraShape(manifest.rank, manifest.alpha, manifest.target_modules), parse_tensors(data))

    def point(self, channel: Channel) -> None:
        """Publish a channel newer than the last; one file, so that no reader sees half of it.

        Raises:
            TransportError: the disk did not take it; the old channel stands.
        """
        payload = canonical(asdict(channel))
        signed = canonical({"payload": payload.decode(), "signature": self._key.sign(CHANNEL_LABEL, payload).hex()})
        try:
            replace_file(self.folder / "channel.json", signed)
        except OSError as error:
            raise TransportError(f"the channel could not be written: {error.strerror}") from error


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
        return self.signed_channel(at_least=at_least)[0]

    def signed_channel(self, *, at_least: int) -> tuple[Channel, bytes]:
        """The channel in force and the very bytes that were verified."""
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
        return channel, raw

    def adapter(self, version_id: str, *, like: Adapter, base_digest: str) -> Adapter:
        """One version's adapter, verified.

        Raises:
            TrustError: manifest, digest, shape or base model do not hold.
        """
        return self.signed_version(version_id, like=like, base_digest=base_digest)[0]

    def signed_version(self, version_id: str, *, like: Adapter, base_digest: str) -> tuple[Adapter, dict[str, bytes]]:
        """One version's adapter and the very files that were verified, by name."""
        folder = self._folder / "versions" / _checked(version_id)
        files = {name: _read(folder / name) for name in SIGNED_FILES}
        manifest = _parse_manifest(files, version_id, self._hub_public)  # (1) signed, (2) this version
        if manifest.lineage.base_digest != base_digest:  # (3) for this base model
            raise TrustError(f"{version_id} belongs to another base model")
        if LoraShape(manifest.rank, manifest.alpha, manifest.target_modules) != like.shape:  # (4) shape
            raise TrustError(f"{version_id} has another LoRA shape")
        data = files["adapter_model.safetensors"]
        return parse_adapter(data, digest=manifest.digest, like=like), files  # (5) bytes, names, dtype, finite


def _parse_manifest(files: Mapping[str, bytes], version_id: str, hub_public: bytes) -> Manifest:
    payload = files["manifest.json"]
    verify(hub_public, MANIFEST_LABEL, payload, files["manifest.sig"])
    try:
        manifest = _MANIFEST.validate_json(payload, strict=True)
    except ValidationError as error:
        raise TrustError(f"the manifest of {version_id} is malformed") from error
    if manifest.id != version_id:
        raise TrustError(f"the manifest of {version_id} names {manifest.id}")
    return manifest


def keep_version(folder: Path, version_id: str, files: Mapping[str, bytes]) -> None:
    """Write a version's verified files below `folder`, whole or not at all; replaces a copy. Raises OSError."""
    final = folder / "versions" / _checked(version_id)
    partial = final.with_name(f".{version_id}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, data in files.items():
        replace_file(partial / name, data)
    shutil.rmtree(final, ignore_errors=True)
    partial.replace(final)


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
