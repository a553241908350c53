"""Proof that what is served is what was published.

For one version, against its adapter as it was verified from its signed files:

1. the digest the version is served under is the adapter's;
2. the tensors in the engine's memory are the adapter's, value for value;
3. a fixed prompt, answered on the path that users take, has the log-probabilities of a
   fresh load of the adapter that shares neither tensors nor cache with what serves;
4. an adapter that changes the base model changes the answer.

The last two are there because a runtime can ignore an adapter, or take another's, and
say nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import numpy as np

from common.adapter import Adapter
from common.errors import TransportError, TrustError
from common.inference.batching import Batcher, GenerationRequest
from common.inference.engine import Engine, GenerationFailed, Lane, LoadedAdapter
from common.inference.sampling import SamplingParameters
from edge_node.serving.router import Loaded, Router, ServedVersion

_TOKENS = 8
_WAIT_S = 120.0
_TOLERANCE = {"float32": 2e-3}
_ROUGH_TOLERANCE = 5e-2
"""Of a log-probability; what the composition of a batch may change in 8 or 16 bits."""


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found; `largest_difference` is of log-probabilities."""

    version: str
    adapter_digest: str
    matches: bool
    reason: str
    largest_difference: float
    checked_at_s: float

    def shown(self) -> dict[str, Any]:
        return asdict(self)


class Probe(Protocol):
    """Compares what is served with what was published."""

    @property
    def reports(self) -> Mapping[str, ProbeReport]:
        """The last report of each version in memory, by version."""
        ...

    def run(self) -> list[ProbeReport]:
        """Look at every version in memory now."""
        ...


class VersionProbe:
    """Looks at versions, and keeps what it found; how one is looked at, its engine knows.

    Args:
        published: a version's adapter, from its verified files.
    """

    def __init__(
        self, router: Router, *, published: Callable[[str], Adapter], clock: Callable[[], float] = time.time
    ) -> None:
        self._router = router
        self._published = published
        self._clock = clock
        self._reports: dict[str, ProbeReport] = {}
        self._one_at_a_time = threading.Lock()

    @property
    def reports(self) -> Mapping[str, ProbeReport]:
        return dict(self._reports)

    def run(self) -> list[ProbeReport]:
        found = []
        for version in self._router.versions:
            try:
                found.append(self.look_at(version, self._published(version.id)))
            except (TrustError, TransportError) as error:
                found.append(self._report(version, f"its published files cannot be used: {error}", np.nan))
        self._reports = {report.version: report for report in found}
        return found

    def check(self, version: ServedVersion, adapter: Adapter) -> None:
        """Raise TrustError unless `version` serves `adapter`; for a version that is about to be served."""
        report = self.look_at(version, adapter)
        if not report.matches:
            raise TrustError(f"version {version.id} is not served as it was published: {report.reason}")

    def look_at(self, version: ServedVersion, adapter: Adapter) -> ProbeReport:
        """Probe one version.

        Raises:
            TransportError: the engine is too busy to tell.
        """
        with self._one_at_a_time:
            reason, difference = self._compare(version.adapter, adapter)
        return self._report(version, reason, difference)

    def _report(self, version: ServedVersion, reason: str, difference: float) -> ProbeReport:
        report = ProbeReport(version.id, version.adapter.digest, not reason, reason, float(difference), self._clock())
        self._reports = {**self._reports, version.id: report}
        return report

    def _compare(self, served: Loaded, adapter: Adapter) -> tuple[str, float]:
        """Why `served` is not `adapter`, empty where it is; and how far their log-probabilities are apart.

        Raises:
            TransportError: it cannot be told now.
        """
        raise NotImplementedError


class EngineProbe(VersionProbe):
    """The probe of an engine in this process.

    Args:
        prompt_ids: the fixed prompt.
    """

    def __init__(
        self,
        engine: Engine,
        batcher: Batcher,
        router: Router,
        *,
        published: Callable[[str], Adapter],
        prompt_ids: list[int],
        base: Adapter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(router, published=published, clock=clock)
        self._engine = engine
        self._batcher = batcher
        self._prompt_ids = prompt_ids
        self._base = base

    def _compare(self, loaded: Loaded, adapter: Adapter) -> tuple[str, float]:
        served = cast(LoadedAdapter, loaded)
        if served.digest != adapter.digest:  # (1)
            return f"it is served under digest {served.digest[:12]}, published is {adapter.digest[:12]}", np.nan
        fresh = self._engine.load(adapter)
        if not _same_tensors(served, fresh):  # (2)
            return "its tensors in memory are not the published ones", np.nan
        tokens, logprobs = self._served_answer(served)
        expected_TV = self._logits(fresh, tokens)
        if not tokens:
            finite = bool(np.isfinite(expected_TV[0]).all())
            return ("it gives no answer where its files give one" if finite else ""), np.nan
        expected = [_log_softmax(row)[token] for row, token in zip(expected_TV, tokens, strict=True)]
        difference = float(np.abs(np.subtract(logprobs, expected)).max())
        tolerance = _TOLERANCE.get(str(self._engine.precision), _ROUGH_TOLERANCE)
        if not difference <= tolerance:  # (3)
            return f"its log-probabilities differ by {difference:.2g} from a fresh load of its files", difference
        if _changes_something(adapter):  # (4)
            base_TV = self._logits(self._engine.load(self._base), tokens)
            if np.array_equal(base_TV, expected_TV):
                return "the engine answers as if it had no adapter", difference
        return "", difference

    def _served_answer(self, served: LoadedAdapter) -> tuple[list[int], list[float]]:
        """A greedy answer on the path of every request; none where the model's output is not finite."""
        request = GenerationRequest(self._prompt_ids, _TOKENS, SamplingParameters(temperature=0.0))
        try:
            answer = self._batcher.submit(request, served).result(_WAIT_S)
        except GenerationFailed:
            return [], []
        except (TimeoutError, CancelledError) as error:
            raise TransportError("the engine is too busy for a probe; it is tried again") from error
        return answer.token_ids, answer.logprobs

    def _logits(self, adapter: LoadedAdapter, tokens: list[int]) -> np.ndarray:
        """Logits [T, V] before each of `tokens`, in a lane of its own; the first ones where there are none."""
        lane = Lane(self._engine, adapter)
        rows = [lane.prefill([self._prompt_ids])[0].copy()]
        rows += [lane.decode(np.array([token], np.int64))[0].copy() for token in tokens[:-1]]
        return np.stack(rows)


def _same_tensors(one: LoadedAdapter, other: LoadedAdapter) -> bool:
    if one.values.keys() != other.values.keys():
        return False
    return all(np.array_equal(value.numpy(), other.values[name].numpy()) for name, value in one.values.items())


def _changes_something(adapter: Adapter) -> bool:
    return any(tensor.any() for name, tensor in adapter.tensors.items() if "lora_B" in name)


def _log_softmax(logits_V: np.ndarray) -> np.ndarray:
    shifted = logits_V.astype(np.float64) - logits_V.max()
    return shifted - np.log(np.exp(shifted).sum())
