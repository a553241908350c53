"""The node's messages over a grid: what leaves a site when things go wrong."""

from __future__ import annotations

import logging

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from common.errors import PrivacyError
from deploy.local_grid import LocalGrid
from edge_node.client_app import make_client_app


def ask(site: object, kind: str, **fields: object) -> dict[str, object]:
    grid = LocalGrid(make_client_app(lambda context: site), 1, workers=1)  # type: ignore[arg-type, return-value]
    try:
        request = RecordDict({"request": ConfigRecord(dict(fields))})  # type: ignore[arg-type]
        (reply,) = grid.send_and_receive([Message(request, next(iter(grid.get_node_ids())), kind)], timeout=30)
    finally:
        grid.close()
    return dict(reply.content["reply"])


class Failing:
    """A site whose every part fails with customer text in the error."""

    name = "site-1"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def look_again(self) -> None:
        raise self._error


def test_an_unexpected_failure_carries_no_text_of_the_site(caplog: pytest.LogCaptureFixture) -> None:
    secret = "the customer said hunter2"
    with caplog.at_level(logging.INFO):
        reply = ask(Failing(KeyError(secret)), "train", payload=b"", signature=b"", witness="")
    assert reply["error"] == "KeyError"
    assert secret not in str(reply)
    assert secret not in caplog.text
    assert "test_client_app.py" in caplog.text  # but the site's own log says where


def test_a_refusal_of_our_own_says_why() -> None:
    error = PrivacyError("needs epsilon 0.3; see /secret/policy.toml", public="the budget is out")
    assert ask(Failing(error), "train", payload=b"", signature=b"", witness="") == {
        "error": "PrivacyError",
        "reason": "the budget is out",
    }


def test_the_message_of_a_refusal_stays_at_the_site() -> None:
    reply = ask(Failing(PrivacyError("see /secret/policy.toml")), "train", payload=b"", signature=b"", witness="")
    assert reply == {"error": "PrivacyError", "reason": "see the site's own log"}


@pytest.mark.parametrize("kind", ["train", "query.golden", "query.identify"])
def test_a_malformed_request_is_answered_with_an_error_class(kind: str) -> None:
    class Idle(Failing):
        def look_again(self) -> None:
            return None

    assert ask(Idle(KeyError("x")), kind, nonsense=1)["error"] in ("KeyError", "AttributeError")
