"""Whatever is served instead of what was published is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from common.adapter import Adapter
from common.errors import TransportError, TrustError
from common.inference.batching import Batcher, Overloaded
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import LoadedAdapter
from deploy.drills import crashing
from deploy.world import World
from edge_node.node import EdgeNode
from edge_node.serving.openai_api import create_app
from edge_node.serving.probe import EngineProbe
from edge_node.serving.router import Arms, Router, ServedVersion
from tests.conftest import changed
from tests.edge_node.adopting.test_adopt import publish_canary
from tests.edge_node.serving.conftest import Served


@pytest.fixture
def published(start: Adapter) -> Adapter:
    return changed(start, seed=1)


@pytest.fixture
def probe_of(served: Served, tokenizer: ChatTokenizer, published: Adapter) -> Callable[..., EngineProbe]:
    def make(version: ServedVersion, batcher: Batcher | None = None) -> EngineProbe:
        return EngineProbe(
            served.engine,
            batcher or served.batcher,
            Router(Arms(version)),
            published=lambda _: published,
            prompt_ids=tokenizer.encode_text("What is 2+2?"),
            base=served.start,
            clock=lambda: 7.0,
        )

    return make


def test_what_was_published_is_served(served: Served, probe_of: Callable[..., EngineProbe], published: Adapter) -> None:
    version = ServedVersion("v1", served.engine.load(published))
    (report,) = probe_of(version).run()
    assert (report.matches, report.reason, report.checked_at_s) == (True, "", 7.0)
    assert report.largest_difference < 1e-4
    assert report.adapter_digest == published.digest


def test_another_adapter_is_noticed(served: Served, probe_of: Callable[..., EngineProbe]) -> None:
    other = served.engine.load(changed(served.start, seed=2))
    (report,) = probe_of(ServedVersion("v1", other)).run()
    assert not report.matches
    assert "digest" in report.reason


def test_another_adapter_under_the_right_digest_is_noticed(
    served: Served, probe_of: Callable[..., EngineProbe], published: Adapter
) -> None:
    other = served.engine.load(changed(served.start, seed=2))
    other.digest = published.digest
    (report,) = probe_of(ServedVersion("v1", other)).run()
    assert "tensors in memory" in report.reason


def test_one_wrong_value_in_memory_is_noticed(
    served: Served, probe_of: Callable[..., EngineProbe], published: Adapter
) -> None:
    loaded = served.engine.load(published)
    value = next(v for name, v in loaded.values.items() if v.numpy().size)
    array = value.numpy().copy()
    array.flat[0] += 1e-3
    value.update_inplace(array)
    (report,) = probe_of(ServedVersion("v1", loaded)).run()
    assert "tensors in memory" in report.reason


class _AnswersWith:
    """A batcher that answers every request with another adapter: a runtime that ignores or mixes them up."""

    def __init__(self, batcher: Batcher, instead: LoadedAdapter) -> None:
        self._batcher = batcher
        self._instead = instead

    def submit(self, request: Any, _: LoadedAdapter) -> Any:
        return self._batcher.submit(request, self._instead)


def test_an_engine_that_answers_with_another_adapter_is_noticed(
    served: Served, probe_of: Callable[..., EngineProbe], published: Adapter
) -> None:
    version = ServedVersion("v1", served.engine.load(published))
    for instead in (served.start, changed(served.start, seed=2)):
        mixed: Any = _AnswersWith(served.batcher, served.engine.load(instead))
        (report,) = probe_of(version, mixed).run()
        assert "log-probabilities differ" in report.reason


def test_an_engine_that_ignores_every_adapter_is_noticed(
    served: Served, probe_of: Callable[..., EngineProbe], published: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = ServedVersion("v1", served.engine.load(published))
    probe = probe_of(version)
    real = EngineProbe._logits
    base = served.engine.load(served.start)
    monkeypatch.setattr(probe, "_batcher", _AnswersWith(served.batcher, base))
    monkeypatch.setattr(EngineProbe, "_logits", lambda self, _, tokens: real(self, base, tokens))
    (report,) = probe.run()
    assert "as if it had no adapter" in report.reason


def test_a_bad_version_served_as_published_matches_and_a_busy_engine_cannot_tell(
    served: Served, tokenizer: ChatTokenizer
) -> None:
    bad = crashing(changed(served.start, seed=1))
    version = ServedVersion("v1", served.engine.load(bad))

    class Busy:
        def submit(self, *_: Any) -> Any:
            raise Overloaded("full")

    def probe(batcher: Any) -> EngineProbe:
        return EngineProbe(
            served.engine, batcher, Router(Arms(version)), published=lambda _: bad, prompt_ids=[1, 2], base=served.start
        )

    assert probe(served.batcher).run()[0].matches  # what is served is what was published: it answers nothing
    with pytest.raises(TransportError):
        probe(Busy()).look_at(version, bad)
    assert not probe(Busy()).run()[0].matches


def test_a_version_that_would_not_be_served_as_published_is_not_adopted(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_canary(world)
    before = node.router.arms
    monkeypatch.setattr(node.probe, "_logits", lambda adapter, tokens: np.zeros((len(tokens), 8)))
    with pytest.raises((TrustError, IndexError)):
        node._adopter.look_again()  # type: ignore[union-attr]
    assert node.router.arms == before
    monkeypatch.undo()
    node.look_again()
    assert node.router.arms.canary is not None


@pytest.fixture
def http(node: EdgeNode) -> Iterator[TestClient]:
    with TestClient(node.app) as http:
        yield http


def test_the_result_shows_and_can_be_asked_for(world: World, node: EdgeNode, http: TestClient) -> None:
    canary = publish_canary(world)
    node.look_again()
    reports = {report["version"]: report for report in http.post("/probe").json()["reports"]}
    assert {"v0", canary} <= set(reports)
    assert all(report["matches"] for report in reports.values())
    shown = http.get("/readyz").json()["served_as_published"]
    assert shown == {"stable": True, "canary": True}
    assert 'headwater_probe_matches{arm="canary"} 1.0' in http.get("/metrics").text
    kept = node._config.data_dir / "adopted" / "versions" / "v0" / "adapter_model.safetensors"
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(bytes(data))
    assert not {r["version"]: r for r in http.post("/probe").json()["reports"]}["v0"]["matches"]
    ready = http.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["status"] == "not what was published"
    assert ready.json()["served_as_published"]["stable"] is False  # and not why: it needs no key


def test_a_node_without_a_probe_says_so(served: Served) -> None:
    with TestClient(create_app(served.service, served.router, served.recorded, provider="p")) as http:
        assert http.post("/probe").status_code == 404
        assert http.get("/readyz").json()["served_as_published"] == {"stable": None}
