from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from deploy.drills import crashing
from edge_node.serving.openai_api import create_app
from edge_node.serving.router import Arms, ServedVersion, Variant
from tests.conftest import changed
from tests.edge_node.serving.conftest import Served
from tests.edge_node.serving.test_openai_api import ASK, with_version


@pytest.fixture
def http(served: Served) -> Iterator[TestClient]:
    app = create_app(served.service, served.router, served.recorded, provider="p", load=lambda: served.batcher.load)
    with TestClient(app) as http:
        yield http


def samples(http: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_arms_are_measured_apart(served: Served, http: TestClient) -> None:
    stable = served.router.arms.stable
    bad = ServedVersion("v7", served.engine.load(crashing(changed(served.start, seed=1))))
    served.router.arms = Arms(stable, bad, 0.0, (Variant("b", with_version(served, "v8", 2), 0.25),))
    completion_tokens = 0
    for model, code in (("headwater/stable", 200), ("headwater/stable", 200), ("headwater/canary", 500)):
        response = http.post("/v1/chat/completions", json={**ASK, "model": model})
        assert response.status_code == code
        if code == 200:
            completion_tokens += response.json()["usage"]["completion_tokens"]
    assert http.post("/v1/chat/completions", json={**ASK, "model": "headwater/b", "stream": True}).status_code == 200
    assert http.post("/v1/chat/completions", json={**ASK, "max_tokens": 10_000}).status_code == 400
    found = samples(http)

    def answers(arm: str, outcome: str) -> float:
        return found.get(("headwater_answers_total", (("arm", arm), ("outcome", outcome))), 0.0)

    assert (answers("stable", "ok"), answers("stable", "refused"), answers("stable", "error")) == (2, 1, 0)
    assert (answers("canary", "ok"), answers("canary", "error")) == (0, 1)
    assert answers("b", "ok") == 1
    assert found["headwater_answer_duration_seconds_count", (("arm", "stable"),)] == 2
    assert found["headwater_first_token_seconds_count", (("arm", "b"),)] == 1
    assert found["headwater_tokens_total", (("arm", "stable"), ("kind", "completion"))] == completion_tokens
    assert found["headwater_arm_share_ratio", (("arm", "b"),)] == 0.25
    assert found["headwater_requests_running", ()] == found["headwater_requests_waiting", ()] == 0
    versions = {
        dict(labels)["arm"]: dict(labels)["version"] for name, labels in found if name == "headwater_version_info"
    }
    assert versions == {"stable": "v0", "canary": "v7", "b": "v8"}
    route = (("route", "/v1/chat/completions"), ("status", "200"))
    assert found["headwater_http_requests_total", route] == 3


def test_labels_stay_few_and_names_are_prometheus(http: TestClient) -> None:
    def ask_for(names: range) -> int:
        for index in names:
            http.get(f"/no/such/path/{index}")
            http.get(f"/v1/models/headwater/v{index}")
            http.post("/v1/chat/completions", json={**ASK, "model": f"model-{index}"})
        return len(samples(http))

    ask_for(range(2))
    assert ask_for(range(2, 4)) == ask_for(range(4, 40))  # nothing new for a new path or model
    after = samples(http)
    for name, labels in after:
        assert re.fullmatch(r"headwater_[a-z_]+", name)
        assert {label for label, _ in labels} <= {
            "route", "status", "arm", "outcome", "kind", "le", "version", "adapter_digest"
        }  # fmt: skip


@pytest.mark.parametrize(
    ("accept", "json_"),
    [
        ("application/json", True),
        ("Application/JSON; q=0.9, */*;q=0.1", True),
        ("*/*", False),  # curl, and Trinity's client
        ("", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("application/json,application/openmetrics-text", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        (",;=,", False),
    ],
)
def test_json_is_for_who_asks_for_it_and_has_the_same_numbers(http: TestClient, accept: str, json_: bool) -> None:
    assert http.post("/v1/chat/completions", json=ASK).status_code == 200
    text = samples(http)
    response = http.get("/metrics", headers={"accept": accept})
    assert response.headers["vary"] == "accept"
    if not json_:
        assert response.headers["content-type"].startswith("text/plain")
        return
    found = response.json()
    assert found['headwater_answers_total{arm="stable",outcome="ok"}'] == 1
    assert found["headwater_requests_running"] == text["headwater_requests_running", ()]
    assert all(isinstance(value, int | float) for value in found.values())
    names = {name.partition("{")[0] for name in found}
    assert {name for name, _ in text if not name.endswith(("_bucket", "_created"))} == names
