"""Adopting what the hub publishes: verify, load, then swap both arms at once.

A channel or version that does not verify changes nothing: the node goes on
serving what it served. The last adopted sequence is kept on disk, so an older
channel is refused across restarts.
"""

from __future__ import annotations

from pathlib import Path

from common.adapter import Adapter
from common.inference.engine import Engine
from edge_node.serving.router import Arms, Router, ServedVersion
from model_hub.repository import Channel, RepositoryReader


class Adopter:
    """Keeps a router in step with the hub's channel.

    Args:
        like: an adapter of the expected names and shapes.
        memory: file that remembers the last adopted sequence.
    """

    def __init__(
        self, reader: RepositoryReader, router: Router, engine: Engine, *, like: Adapter, base_digest: str, memory: Path
    ) -> None:
        self._reader = reader
        self._router = router
        self._engine = engine
        self._like = like
        self._base_digest = base_digest
        self._memory = memory
        self._serving_sequence = 0

    def look_again(self) -> None:
        """Adopt the channel if it is newer than what is served.

        Raises:
            TrustError: something published does not verify; the arms are unchanged.
            TransportError: the hub cannot be read now; the arms are unchanged.
        """
        channel = self._reader.channel(at_least=self._last_adopted())
        if channel.sequence == self._serving_sequence:
            return
        arms = self._load(channel)
        self._remember(channel.sequence)
        self._router.arms = arms
        self._serving_sequence = channel.sequence

    def fetch(self, version_id: str) -> Adapter:
        """One version's verified adapter."""
        return self._reader.adapter(version_id, like=self._like, base_digest=self._base_digest)

    def _load(self, channel: Channel) -> Arms:
        stable = self._version(channel.stable)
        canary = self._version(channel.canary) if channel.canary is not None else None
        return Arms(stable, canary, channel.canary_share)

    def _version(self, version_id: str) -> ServedVersion:
        arms = self._router.arms
        for loaded in (arms.stable, arms.canary):
            if loaded is not None and loaded.id == version_id:
                return loaded
        return ServedVersion(version_id, self._engine.load(self.fetch(version_id)))

    def _last_adopted(self) -> int:
        return int(self._memory.read_text()) if self._memory.exists() else 0

    def _remember(self, sequence: int) -> None:
        partial = self._memory.with_suffix(".partial")
        partial.write_text(f"{sequence}\n")
        partial.replace(self._memory)
