"""Adopting what the hub publishes: verify, keep a copy, then swap both arms at once.

A channel or version that does not verify changes nothing: the node goes on
serving what it served. What was adopted is kept on disk as it was signed, so a
node that starts without its hub serves the last adopted version, and an older
channel is refused across restarts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common.adapter import Adapter
from common.errors import TransportError
from common.inference.engine import Engine
from edge_node.serving.router import Arms, Router, ServedVersion
from model_hub.repository import Channel, RepositoryReader, copy_channel, copy_version

KEPT_VERSIONS = 3


class Adopter:
    """Keeps a router in step with the hub's channel.

    Args:
        hub: the hub's repository.
        like: an adapter of the expected names and shapes.
        kept: folder of this site's verified copies.
    """

    def __init__(
        self,
        hub: Path,
        router: Router,
        engine: Engine,
        *,
        hub_public: bytes,
        like: Adapter,
        base_digest: str,
        kept: Path,
    ) -> None:
        self._hub = hub
        self._kept = kept
        self._from_hub = RepositoryReader(hub, hub_public=hub_public)
        self._from_kept = RepositoryReader(kept, hub_public=hub_public)
        self._router = router
        self._engine = engine
        self._like = like
        self._base_digest = base_digest
        self._serving: Channel | None = None

    def resume(self) -> None:
        """Serve what was adopted before, if anything was.

        Raises:
            TrustError: the kept copies do not verify; the arms are unchanged.
        """
        if (self._kept / "channel.json").exists():
            self._serve(self._from_kept.channel(at_least=0), self._from_kept)

    def look_again(self) -> None:
        """Adopt the hub's channel if it is newer than what is served.

        Raises:
            TrustError: something published, or kept, does not verify; the arms are unchanged.
            TransportError: hub or disk cannot be used now; the arms are unchanged.
        """
        kept = self._kept / "channel.json"
        last = self._from_kept.channel(at_least=0).sequence if kept.exists() else 0
        channel = self._from_hub.channel(at_least=last)
        if channel == self._serving:
            return
        named = [v for v in (channel.stable, channel.canary) if v is not None]
        for version in named:
            self.fetch(version)
        try:
            for version in named:
                copy_version(self._hub, self._kept, version)
            self._serve(channel, self._from_kept)
            copy_channel(channel, self._hub, self._kept)
            self._forget_all_but(named)
        except OSError as error:
            raise TransportError(f"adopted versions could not be kept: {error.strerror}") from error

    def fetch(self, version_id: str) -> Adapter:
        """One version's adapter from the hub, verified."""
        return self._from_hub.adapter(version_id, like=self._like, base_digest=self._base_digest)

    def _serve(self, channel: Channel, reader: RepositoryReader) -> None:
        stable = self._version(channel.stable, reader)
        canary = self._version(channel.canary, reader) if channel.canary is not None else None
        self._router.arms = Arms(stable, canary, channel.canary_share)
        self._serving = channel

    def _version(self, version_id: str, reader: RepositoryReader) -> ServedVersion:
        arms = self._router.arms
        for loaded in (arms.stable, arms.canary):
            if loaded is not None and loaded.id == version_id:
                return loaded
        adapter = reader.adapter(version_id, like=self._like, base_digest=self._base_digest)
        return ServedVersion(version_id, self._engine.load(adapter))

    def _forget_all_but(self, named: list[str]) -> None:
        """Keep the versions in use and the newest others, as many as were promised."""
        folders = sorted((self._kept / "versions").iterdir(), key=lambda f: f.stat().st_mtime_ns, reverse=True)
        for folder in [f for f in folders if f.name not in named][KEPT_VERSIONS:]:
            shutil.rmtree(folder)
