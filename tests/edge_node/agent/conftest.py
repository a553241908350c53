from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.edge_node.agent.scripted import Script, scripted


@pytest.fixture(scope="session")
def _script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture
def script(_script: Script) -> Iterator[Script]:
    """A server that answers as told; every answer it was given must have been asked for."""
    _script.answers.clear()
    _script.requests.clear()
    yield _script
    assert _script.answers == []
