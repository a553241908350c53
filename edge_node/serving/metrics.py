"""What a node counts, as Prometheus text or JSON: base units, few labels, nothing of any request's content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from common.inference.batching import Load
from edge_node.serving.exchange import Exchange
from edge_node.serving.router import Choice, Router

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TEXTS = ("text/", "application/openmetrics-text", "application/vnd.google.protobuf")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The instruments of one node.

    Labels: the route's template, the status code, the arm (stable, canary, pinned, configured variants). Versions
    show in one information metric for what is in memory now, so they never pile up.

    Args:
        load: requests waiting and running, where this node generates itself.
        matches: what the last probe found, by version; see `probe.py`.
    """

    def __init__(
        self, router: Router, *, load: Callable[[], Load] | None, matches: Callable[[], dict[str, bool]]
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "headwater_http_requests", "Answered HTTP requests.", ["route", "status"], registry=registry
        )
        self._request_seconds = Histogram(
            "headwater_http_request_duration_seconds",
            "From the first byte of a request to the last of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._answers = Counter(
            "headwater_answers", "Answers by outcome: ok, error, left, refused.", ["arm", "outcome"], registry=registry
        )
        self._answer_seconds = Histogram(
            "headwater_answer_duration_seconds",
            "From the request to the whole answer.",
            ["arm"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_token_seconds = Histogram(
            "headwater_first_token_seconds",
            "From the request to the first token.",
            ["arm"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._tokens = Counter("headwater_tokens", "Tokens: prompt or completion.", ["arm", "kind"], registry=registry)
        registry.register(_Now(router, load, matches))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def samples(self) -> dict[str, float]:
        """The same numbers for programs without a Prometheus parser, by name and labels as the text writes them."""
        return {
            _written(sample): sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        }

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def answered(self, exchange: Exchange, seconds: float) -> None:
        arm = exchange.choice.arm
        self._answers.labels(arm, "ok").inc()
        self._answer_seconds.labels(arm).observe(seconds)
        for answer in exchange.answers:
            self._first_token_seconds.labels(arm).observe(answer.generation.wait_s + answer.generation.first_token_s)
        self._tokens.labels(arm, "prompt").inc(exchange.prompt_tokens)
        self._tokens.labels(arm, "completion").inc(exchange.completion_tokens)

    def not_answered(self, choice: Choice, outcome: str) -> None:
        """Outcome `error` is the node's fault, `refused` the request's, `left` the client's."""
        self._answers.labels(choice.arm, outcome).inc()


class _Now(Collector):
    """What can only be asked for: load, versions, the last probe."""

    def __init__(self, router: Router, load: Callable[[], Load] | None, matches: Callable[[], dict[str, bool]]) -> None:
        self._router = router
        self._load = load
        self._matches = matches

    def collect(self) -> Iterator[GaugeMetricFamily | InfoMetricFamily]:
        if self._load is not None:
            load = self._load()
            yield _gauge("headwater_requests_waiting", "Generations that wait for a slot.", [((), load.waiting)])
            yield _gauge("headwater_requests_running", "Generations in a slot.", [((), load.running)])
        versions = InfoMetricFamily("headwater_version", "The version of each arm.", labels=["arm"])
        arms = self._router.arms
        for arm, version in arms.named.items():
            versions.add_metric([arm], {"version": version.id, "adapter_digest": version.adapter.digest})
        yield versions
        shares = [((variant.name,), variant.share) for variant in arms.variants]
        canary = [(("canary",), arms.canary_share)] if arms.canary is not None else []
        yield _gauge("headwater_arm_share_ratio", "Share of conversations.", [*canary, *shares], ["arm"])
        matches = self._matches()
        found = [((arm,), float(matches[v.id])) for arm, v in arms.named.items() if v.id in matches]
        yield _gauge("headwater_probe_matches", "1 where what is served is what was published.", found, ["arm"])


def wants_json(accept: str) -> bool:
    """Whether a client asks for JSON and for no kind of text; who takes anything gets Prometheus text."""
    kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return "application/json" in kinds and not any(kind.startswith(_TEXTS) for kind in kinds)


def _written(sample: Sample) -> str:
    labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name


def _gauge(
    name: str, text: str, values: Sequence[tuple[tuple[str, ...], float]], labels: Sequence[str] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label, value in values:
        family.add_metric(label, value)
    return family
