"""The model hub: candidate → gate → canary → stable, and back.

It holds the signing key of versions and channel. Time is injected. Opened on a
folder it has used before, it goes on where it stopped, a running canary included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from common.adapter import Adapter
from common.errors import RoundError
from common.identity import SigningKey
from model_hub import gates
from model_hub.catalog import Catalog, Transition
from model_hub.evidence import (
    DEFAULT_THRESHOLDS,
    Decision,
    PairedOutcome,
    Thresholds,
    Verdict,
    judge_sites,
    tolerated_reports,
)
from model_hub.repository import Channel, Repository
from model_hub.rollout import Stage
from model_hub.version import Lineage, ModelVersion

CANARY_SHARE = 0.05


class Hub:
    """One adapter line's versions.

    Args:
        folder: repository and catalog live here.
        base_model: name written into the PEFT folders.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        key: SigningKey,
        *,
        base_model: str,
        clock: Callable[[], float],
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
    ) -> None:
        self.repository = Repository(folder / "repository", key)
        self.catalog = Catalog(f"sqlite:///{folder / 'catalog.sqlite'}")
        self.thresholds = thresholds
        self._base_model = base_model
        self._clock = clock
        self._adapters: dict[str, Adapter] = {}
        self._resume()

    def close(self) -> None:
        self.catalog.close()

    @property
    def stable(self) -> ModelVersion:
        return self.catalog.in_stage(Stage.STABLE)[-1]

    @property
    def canary(self) -> ModelVersion | None:
        found = self.catalog.in_stage(Stage.CANARY)
        return found[0] if found else None

    def adapter(self, version_id: str) -> Adapter:
        """A published version's adapter; TrustError where its files were changed."""
        if version_id not in self._adapters:
            self._adapters[version_id] = self.repository.adapter(version_id)
        return self._adapters[version_id]

    def found(self, adapter: Adapter, *, base_digest: str) -> ModelVersion:
        """Publish the initial version as stable: the adapter every site starts from."""
        begun = [v for v in self.catalog.in_stage(Stage.CANDIDATE) if v.id == "v0"]  # by a process that was killed
        version = begun[0] if begun else self._publish("v0", adapter, parent=None, lineage=Lineage(base_digest))
        self._move(*((version.id, stage, "initial adapter") for stage in (Stage.GATED, Stage.CANARY, Stage.STABLE)))
        self._point()
        return version

    def submit(
        self,
        adapter: Adapter,
        *,
        lineage: Lineage,
        largest_change: float,
        published: Adapter | None = None,
        unsafe_skip_gates: bool = False,
    ) -> ModelVersion:
        """Publish a candidate on top of the stable version and gate it.

        Args:
            largest_change: L2 bound on the change from its parent.
            published: the same function in other factors, published instead of `adapter`.
            unsafe_skip_gates: for drills that show what the canary catches by itself.
        Returns:
            the version, in stage gated or rejected.
        """
        parent = self.stable
        begun = self.made_by(lineage.plan_digest)  # by a process that was killed
        if begun is not None and begun.stage is Stage.CANDIDATE and begun.digest == (published or adapter).digest:
            version = begun
        else:
            number = len(self.catalog.versions())
            version = self._publish(f"v{number}", published or adapter, parent=parent.id, lineage=lineage)
        refused = gates.refusal(
            adapter, self.adapter(parent.id), largest_change=largest_change
        ) or gates.not_the_same_function(adapter, published or adapter)
        if refused is not None and not unsafe_skip_gates:
            self._move((version.id, Stage.REJECTED, refused))
        else:
            reason = "gates passed" if refused is None else f"drill: gates skipped; they said {refused}"
            self._move((version.id, Stage.GATED, reason))
        return self.version(version.id)

    def start_canary(self, version: ModelVersion, *, share: float = CANARY_SHARE) -> None:
        """Give a gated version its share of traffic.

        Raises:
            RoundError: another canary is still undecided.
        """
        if self.canary is not None:
            raise RoundError(f"{self.canary.id} is still in canary; {version.id} has to wait")
        self._move((version.id, Stage.CANARY, f"{share:.0%} of traffic"))
        self._point(share)

    def observe(self, outcomes: Mapping[str, Sequence[PairedOutcome]]) -> Verdict:
        """Take a window's outcomes by site, decide, and act on the decision.

        As many reports may be false as `tolerated_reports` says of all sites that
        have reported on this canary, also of those that have fallen silent.
        """
        canary = self.canary
        if canary is None:
            raise RoundError("there is no canary to observe")
        now = self._clock()
        so_far = self.catalog.outcomes(canary.id)
        for site, made in outcomes.items():
            so_far.setdefault(site, []).extend(made)
        reporting = {site: made for site, made in so_far.items() if made}
        liars = tolerated_reports(len(reporting))
        verdict = judge_sites(
            reporting, liars=liars, elapsed_s=now - self._canary_since_s(canary), thresholds=self.thresholds
        )
        self.catalog.record_evidence(canary.id, verdict, outcomes, at_s=now)
        if verdict.decision is Decision.PROMOTE:
            self._move(
                (self.stable.id, Stage.RETIRED, f"replaced by {canary.id}"),
                (canary.id, Stage.STABLE, verdict.reason),
            )
            self._point()
        elif verdict.decision is Decision.ROLL_BACK:
            self._move((canary.id, Stage.ROLLED_BACK, verdict.reason))
            self._point()
        return verdict

    def version(self, version_id: str) -> ModelVersion:
        """A version as it is now."""
        return next(v for v in self.catalog.versions() if v.id == version_id)

    def made_by(self, plan_digest: str) -> ModelVersion | None:
        """The version of the round with this plan, if there is one."""
        made = [v for v in self.catalog.versions() if plan_digest and v.lineage.plan_digest == plan_digest]
        return made[-1] if made else None

    def _resume(self) -> None:
        """Finish what a killed process left: files nobody knows of, a channel that is behind the catalog."""
        known = {version.id for version in self.catalog.versions()}
        self.repository.forget_all_but(known)
        channel = self.repository.channel()
        self._sequence = channel.sequence if channel is not None else 0
        if not self.catalog.in_stage(Stage.STABLE):
            return
        canary = self.canary
        named = (channel.stable, channel.canary) if channel is not None else None
        if named != (self.stable.id, canary.id if canary else None):
            self._point(CANARY_SHARE)

    def _canary_since_s(self, canary: ModelVersion) -> float:
        steps = self.catalog.transitions()
        return next(t.at_s for t in steps if t.version == canary.id and t.stage is Stage.CANARY)

    def _move(self, *moves: tuple[str, Stage, str]) -> None:
        now = self._clock()
        self.catalog.move(*(Transition(version, stage, reason, now) for version, stage, reason in moves))

    def _publish(self, version_id: str, adapter: Adapter, *, parent: str | None, lineage: Lineage) -> ModelVersion:
        self.repository.publish(version_id, adapter, parent=parent, lineage=lineage, base=self._base_model)
        self._adapters[version_id] = adapter
        version = ModelVersion(version_id, parent, adapter.digest, lineage, Stage.CANDIDATE, "published", self._clock())
        self.catalog.add(version)
        return version

    def _point(self, share: float = 0.0) -> None:
        self._sequence += 1
        canary = self.canary
        self.repository.point(
            Channel(self._sequence, self.stable.id, canary.id if canary else None, share if canary else 0.0)
        )
