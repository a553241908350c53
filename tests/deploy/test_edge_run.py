"""`headwater edge run` with nothing but itself, as a newcomer starts it, and its keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from openai import AuthenticationError, OpenAI

from tests.deploy.conftest import Headwater

COMMAND = Path(sys.executable).with_name("headwater")


@contextmanager
def running(folder: Path, *settings: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A node in its own process, started in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [COMMAND, "edge", "run", "--set", f"port={port}"]
    for setting in (*settings, "engine.threads=1", "engine.slots=4", "engine.context_tokens=512"):
        arguments += ["--set", setting]
    node = subprocess.Popen(
        arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    break
            except httpx2.TransportError:
                assert node.poll() is None, node.stderr.read() if node.stderr else ""
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", node
    finally:
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
            node.communicate(timeout=60)


@pytest.mark.slow
def test_a_node_runs_on_nothing_and_keeps_what_is_its_own(tmp_path: Path, headwater: Headwater) -> None:
    ask = {"model": "headwater", "messages": [{"role": "user", "content": "What is 23+45?"}], "temperature": 0}
    with running(tmp_path, "log_requests=true") as (url, node):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(**ask)  # type: ignore[call-overload]
            assert answer.system_fingerprint == "base"
            assert "68" in answer.choices[0].message.content
        ready = httpx2.get(f"{url}/readyz").json()
        assert ready["served_as_published"] == {"stable": True}
        for path in (tmp_path / "headwater-data").rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0, (path, oct(mode))
        assert stat.S_IMODE((tmp_path / "headwater-data").stat().st_mode) == 0o700
        # the first key closes the running node to everybody without one
        data = f"data_dir={tmp_path / 'headwater-data'}"
        secret = headwater("edge", "key", "add", "agent", "--set", data).stdout.strip()
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(AuthenticationError):
                client.chat.completions.create(**ask)  # type: ignore[call-overload]
            assert client.with_options(api_key=secret).chat.completions.create(**ask).choices  # type: ignore[call-overload]
        assert "agent" in headwater("edge", "key", "list", "--set", data).stdout
        headwater("edge", "key", "revoke", "agent", "--set", data)
        key = {"authorization": f"Bearer {secret}"}
        assert httpx2.post(f"{url}/v1/chat/completions", json=ask, headers=key).status_code == 401
        node.send_signal(signal.SIGTERM)
        out, errors = node.communicate(timeout=60)
    assert "Traceback" not in errors
    assert "no API key is needed on this machine; follows no federation; only serves: policy.toml is missing" in out
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    served = [line for line in lines if line.get("route") == "/v1/chat/completions"]
    assert [line["status"] for line in served] == [200, 200]
    assert [line.get("key") for line in served] == ["local", "agent"]
    assert "23+45" not in errors


def test_a_node_that_others_could_reach_without_a_key_does_not_start(tmp_path: Path, headwater: Headwater) -> None:
    refused = headwater("edge", "run", "--set", "host=0.0.0.0", "--set", f"data_dir={tmp_path / 'data'}")
    assert refused.returncode == 2
    assert "make one first: headwater edge key add NAME" in refused.stderr
    assert refused.stderr.count("\n") == 1
    half = headwater("edge", "run", "--set", "federation=f", "--set", f"data_dir={tmp_path / 'data'}")
    assert half.returncode == 2
    assert "federation is set but hub, hub_key, aggregator_key are not" in half.stderr


def test_keys_are_made_listed_and_revoked(tmp_path: Path, headwater: Headwater) -> None:
    data = ("--set", f"data_dir={tmp_path / 'data'}")
    assert "there are no keys" in headwater("edge", "key", "list", *data).stdout
    made = headwater("edge", "key", "add", "agent", "--scope", "chat", "--scope", "metrics", *data)
    assert made.stdout.startswith("hw-")
    file = tmp_path / "data" / "keys" / "api_keys.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made.stdout.strip() not in file.read_text()
    listed = headwater("edge", "key", "list", *data).stdout
    assert "agent" in listed
    assert "chat metrics" in listed
    again = headwater("edge", "key", "add", "agent", *data)
    assert again.returncode == 2
    assert "already" in again.stderr
    assert "no key named" in headwater("edge", "key", "revoke", "nobody", *data).stderr
    assert headwater("edge", "key", "revoke", "agent", *data).returncode == 0
    file.chmod(0o640)
    assert "0640" in headwater("edge", "key", "list", *data).stderr
