"""Adopting what the hub publishes: verify, keep a copy, then swap both arms at once.

A channel or version that does not verify changes nothing: the node goes on
serving what it served. What was adopted is kept on disk as it was signed, so a
node that starts without its hub serves the last adopted version, and an older
channel is refused across restarts.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from common.adapter import Adapter
from common.errors import TransportError, TrustError
from common.identity import replace_file
from common.telemetry import log_event
from edge_node.config import VariantSettings
from edge_node.serving.router import KEPT_VERSIONS, Arms, Loads, Router, ServedVersion, Variant
from model_hub.repository import Channel, RepositoryReader, keep_version

logger = logging.getLogger("headwater.edge")

Check = Callable[[ServedVersion, Adapter], None]
"""Raises TrustError where a loaded version does not serve the adapter it was loaded from."""


class Adopter:
    """Keeps a router in step with the hub's channel.

    Args:
        hub: the hub's repository.
        like: an adapter of the expected names and shapes.
        kept: folder of this site's verified copies.
        variants: arms beside stable and canary, where their versions can be had.
        check: asked about every version before it is served.
    """

    def __init__(
        self,
        hub: Path,
        router: Router,
        engine: Loads,
        *,
        hub_public: bytes,
        like: Adapter,
        base_digest: str,
        kept: Path,
        variants: Mapping[str, VariantSettings] | None = None,
        check: Check | None = None,
    ) -> None:
        self._kept = kept
        self._from_hub = RepositoryReader(hub, hub_public=hub_public)
        self._from_kept = RepositoryReader(kept, hub_public=hub_public)
        self._router = router
        self._engine = engine
        self._like = like
        self._base_digest = base_digest
        self._variants = dict(variants or {})
        self._check = check
        self._serving: Channel | None = None
        self._one_at_a_time = threading.Lock()

    def resume(self) -> None:
        """Serve what was adopted before, if anything was.

        Raises:
            TrustError: the kept copies do not verify; the arms are unchanged.
        """
        if (self._kept / "channel.json").exists():
            channel = self._from_kept.channel(at_least=0)
            named = [v for v in (channel.stable, channel.canary) if v is not None]
            kept = {v: self.kept(v) for v in named}
            for variant in self._wanted(named):
                try:
                    kept[variant] = self.kept(variant)
                except (TrustError, TransportError) as error:
                    log_event(logger, "variant left out", version=variant, reason=str(error))
            self._serve(channel, kept)

    def look_again(self) -> None:
        """Adopt the hub's channel if it is newer than what is served.

        Raises:
            TrustError: something published, or kept, does not verify; the arms are unchanged.
            TransportError: hub or disk cannot be used now; the arms are unchanged.
        """
        with self._one_at_a_time:
            self._adopt()

    def _adopt(self) -> None:
        kept = self._kept / "channel.json"
        last = self._from_kept.channel(at_least=0).sequence if kept.exists() else 0
        channel, signed = self._from_hub.signed_channel(at_least=last)
        if channel == self._serving:
            return
        named = [v for v in (channel.stable, channel.canary) if v is not None]
        verified = {v: self._from_hub.signed_version(v, like=self._like, base_digest=self._base_digest) for v in named}
        for variant in self._wanted(named):
            try:
                verified[variant] = self._from_hub.signed_version(
                    variant, like=self._like, base_digest=self._base_digest
                )
                named.append(variant)
            except (TrustError, TransportError) as error:
                log_event(logger, "variant left out", version=variant, reason=str(error))
        try:
            for version, (_, files) in verified.items():
                keep_version(self._kept, version, files)
            replace_file(kept, signed)  # before anything is served, so that this channel is never forgotten
            self._forget_all_but(named)
        except OSError as error:
            raise TransportError(f"adopted versions could not be kept: {error.strerror}") from error
        self._serve(channel, {version: adapter for version, (adapter, _) in verified.items()})

    def fetch(self, version_id: str) -> Adapter:
        """One version's adapter from the hub, verified."""
        return self._from_hub.adapter(version_id, like=self._like, base_digest=self._base_digest)

    def kept(self, version_id: str) -> Adapter:
        """One version's adapter from this site's own copies, verified."""
        return self._from_kept.adapter(version_id, like=self._like, base_digest=self._base_digest)

    def _wanted(self, named: list[str]) -> list[str]:
        """Versions of variants that no arm of the channel names."""
        return sorted({variant.version for variant in self._variants.values()} - set(named))

    def _serve(self, channel: Channel, adapters: Mapping[str, Adapter]) -> None:
        """Swap all arms in one assignment; a version that is in memory already is not loaded again."""
        loaded = {version.id: version for version in self._router.versions}
        served: dict[str, ServedVersion] = {}
        for name, adapter in adapters.items():
            if name in loaded and loaded[name].adapter.digest == adapter.digest:
                served[name] = loaded[name]
                continue
            served[name] = ServedVersion(name, self._engine.load(adapter))
            if self._check is not None:
                self._check(served[name], adapter)
        canary = served[channel.canary] if channel.canary is not None else None
        variants = tuple(
            Variant(name, served[v.version], v.share) for name, v in self._variants.items() if v.version in served
        )
        self._router.arms = Arms(served[channel.stable], canary, channel.canary_share, variants)
        self._serving = channel

    def _forget_all_but(self, named: list[str]) -> None:
        """Keep the versions in use and the newest others, as many as were promised."""
        folders = sorted((self._kept / "versions").iterdir(), key=lambda f: f.stat().st_mtime_ns, reverse=True)
        for folder in [f for f in folders if f.name not in named][KEPT_VERSIONS:]:
            shutil.rmtree(folder)
