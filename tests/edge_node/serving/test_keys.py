from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx2
import pytest
from openai import AuthenticationError, OpenAI, PermissionDeniedError

from common.errors import ConfigError, TrustError
from edge_node.config import EdgeConfig
from edge_node.serving.keys import CHAT, FEEDBACK, LOCAL, METRICS, KeyRing, bearer_of, key_file, open_keys
from edge_node.serving.openai_api import create_app
from tests.edge_node.serving.conftest import Served, on_loopback
from tests.edge_node.serving.test_openai_api import ASK


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(key_file(tmp_path))


def test_only_a_hash_is_on_disk_for_the_owner_alone(ring: KeyRing, tmp_path: Path) -> None:
    secret = ring.add("agent", [CHAT], now_s=1.0)
    path = key_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret.removeprefix("hw-") not in path.read_text()
    (key,) = json.loads(path.read_text())["keys"]
    assert key["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_key_is_its_owners_and_nobody_elses(ring: KeyRing) -> None:
    assert ring.caller(None) == LOCAL  # no key was ever made
    first, second = ring.add("first", [CHAT], now_s=1.0), ring.add("second", [CHAT, FEEDBACK], now_s=2.0)
    assert len(first) > 40
    found = ring.caller(second)
    assert found is not None
    assert (found.id, found.scopes) == ("second", {CHAT, FEEDBACK})
    for wrong in (None, "", "hw-", first[:-1], f"{first}x", "hw-\udcff"):
        assert ring.caller(wrong) is None
    ring.revoke("first")
    assert ring.caller(first) is None
    ring.revoke("second")
    assert ring.caller(None) is None  # none left is not none needed


def test_another_process_sees_a_new_key_and_a_lost_file_lets_nobody_in(ring: KeyRing, tmp_path: Path) -> None:
    other = KeyRing(key_file(tmp_path))
    secret = ring.add("agent", [CHAT], now_s=1.0)
    assert other.caller(None) is None
    assert other.caller(secret) is not None
    key_file(tmp_path).chmod(0o644)
    assert other.caller(secret) is None
    with pytest.raises(TrustError, match="0644"):
        KeyRing(key_file(tmp_path))
    key_file(tmp_path).chmod(0o600)
    assert other.caller(secret) is not None
    key_file(tmp_path).unlink()
    assert other.caller(secret) is None
    assert other.caller(None) is None


@pytest.mark.parametrize("text", ["", "{}", '{"keys": [{}]}', '{"keys": [], "more": 1}', "[" * 10_000])
def test_a_damaged_file_is_refused(ring: KeyRing, tmp_path: Path, text: str) -> None:
    ring.add("agent", [CHAT], now_s=1.0)
    key_file(tmp_path).write_text(text)
    with pytest.raises(TrustError, match="no API keys"):
        KeyRing(key_file(tmp_path))
    assert ring.caller(None) is None


def test_bad_names_and_scopes_are_refused(ring: KeyRing) -> None:
    ring.add("agent", [CHAT], now_s=1.0)
    for name, scopes in (("agent", [CHAT]), ("local", [CHAT]), ("A b", [CHAT]), ("x", ["root"]), ("x", [])):
        with pytest.raises(ConfigError):
            ring.add(name, scopes, now_s=1.0)
    with pytest.raises(ConfigError, match="no key named"):
        ring.revoke("nobody")


def test_a_node_others_can_reach_needs_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "10.0.0.5", "::", "node.example"):
        with pytest.raises(ConfigError, match="headwater edge key add"):
            open_keys(EdgeConfig(data_dir=tmp_path, host=host))
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert not open_keys(EdgeConfig(data_dir=tmp_path, host=host)).in_use
    KeyRing(key_file(tmp_path)).add("agent", [CHAT], now_s=1.0)
    assert open_keys(EdgeConfig(data_dir=tmp_path, host="0.0.0.0")).in_use


def test_a_header_holds_one_key() -> None:
    assert bearer_of([(b"authorization", b"Bearer abc")]) == "abc"
    assert bearer_of([(b"Authorization", b"bearer abc")]) == "abc"
    for headers in ([], [(b"authorization", b"Basic abc")], [(b"authorization", b"Bearer")]):
        assert bearer_of(headers) is None
    assert bearer_of([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")]) is None


def test_keys_and_scopes_hold_over_http(served: Served, ring: KeyRing) -> None:
    secrets = {scope: ring.add(scope, [scope], now_s=1.0) for scope in (CHAT, FEEDBACK, METRICS)}
    app = create_app(served.service, served.router, served.recorded, provider="p", keys=ring)
    with on_loopback(app, keys=ring) as (url, _):
        with OpenAI(base_url=f"{url}/v1", api_key=secrets[CHAT], max_retries=0) as client:
            assert client.chat.completions.create(**ASK).choices
            assert served.recorded.exchanges[-1].request.key_id == CHAT
            assert client.models.list().data
            wrong = client.with_options(api_key=secrets[CHAT][:-1])
            with pytest.raises(AuthenticationError) as refused:
                wrong.chat.completions.create(**ASK)
            assert refused.value.code == "invalid_api_key"
            assert refused.value.response.headers["www-authenticate"] == "Bearer"
            with pytest.raises(PermissionDeniedError):
                client.with_options(api_key=secrets[FEEDBACK]).chat.completions.create(**ASK)
        for path, scope in (("/metrics", METRICS), ("/v1/models", CHAT)):
            codes = {
                s: httpx2.get(url + path, headers={"authorization": f"Bearer {k}"}).status_code
                for s, k in secrets.items()
            }
            assert codes == {s: 200 if s == scope else 403 for s in secrets}
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/openapi.json", 401), ("/nothing", 401)):
            assert httpx2.get(url + path).status_code == status
        ring.revoke(CHAT)
        key = {"authorization": f"Bearer {secrets[CHAT]}"}
        assert httpx2.get(f"{url}/v1/models", headers=key).status_code == 401
