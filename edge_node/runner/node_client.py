"""The runner's requests to the node: feedback and commits."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx2

from common.errors import TransportError

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRIES, _FIRST_PAUSE_S = 3, 0.25


class NodeClient:
    """Speaks the training contract; repeats what failed in passing, because repeating changes nothing.

    Args:
        endpoint: the node's URL, without /v1.
        timeout_s: of one try.
    """

    def __init__(self, endpoint: str, *, api_key: str, timeout_s: float) -> None:
        self._http = httpx2.Client(
            base_url=endpoint,
            timeout=timeout_s,
            headers={"authorization": f"Bearer {api_key}"},
            trust_env=False,  # no proxy of the environment sees the key, or what is said about a site's answers
        )

    def feedback(
        self,
        response_ids: Sequence[str],
        reward: float | None,
        *,
        task_id: str,
        run_id: str,
        labels: Sequence[str] = (),
    ) -> None:
        """Say how good answers were; None for the site's default reward.

        Raises:
            TransportError: the node did not take it; the message is the node's.
        """
        said: dict[str, Any] = {"msg_ids": list(response_ids), "reward": reward, "task_id": task_id, "run_id": run_id}
        if labels:
            said["labels"] = list(labels)
        self._post("/feedback", said)

    def commit(self, *, timeout_s: float | None = None) -> None:
        """Say that nothing more will be said about the answers so far; once, if `timeout_s` is given.

        Raises:
            TransportError: the node did not take it.
        """
        self._post("/commit", {}, timeout_s=timeout_s)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> None:
        tries = _TRIES if timeout_s is None else 1
        timeout = self._http.timeout if timeout_s is None else httpx2.Timeout(timeout_s)
        for left in reversed(range(tries)):
            try:
                response = self._http.post(path, json=body, timeout=timeout)
            except httpx2.HTTPError as error:
                if not left:
                    raise TransportError(f"{path}: {type(error).__name__}") from error
            else:
                if response.is_success:
                    return
                if response.status_code not in _AGAIN or not left:
                    raise TransportError(f"{path}: {response.status_code} {_message(response)}")
            time.sleep(_FIRST_PAUSE_S * 2 ** (tries - 1 - left) * (1 + random.random()))


def _message(response: httpx2.Response) -> str:
    """What the node says is wrong, if it says so in the form of the OpenAI API."""
    try:
        return str(response.json()["error"]["message"])[:200]
    except (ValueError, LookupError, TypeError):
        return response.reason_phrase
