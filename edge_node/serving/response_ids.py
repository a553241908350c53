"""Ids of responses that this node can tell for its own, whenever and whatever became of the answer.

An id ends in a keyed hash of what it begins with and of the API key it was given to.
So feedback about an answer that was not kept, also before a restart, is told from
feedback about an answer that was never given, and nothing needs to be remembered.
"""

from __future__ import annotations

import hmac
import re
import secrets

_PREFIX = "chatcmpl-"
_ID = re.compile(r"chatcmpl-([0-9a-f]{24})([0-9a-f]{16})")


class ResponseIds:
    """Makes ids and knows them again.

    Args:
        secret: 32 bytes that never leave the site.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def new(self, key_id: str) -> str:
        """The id of a response to this API key."""
        drawn = secrets.token_hex(12)
        return f"{_PREFIX}{drawn}{self._tag(drawn, key_id)}"

    def given_to(self, key_id: str, name: str) -> bool:
        """Whether a response of this id was made for this API key."""
        found = _ID.fullmatch(name)
        return found is not None and hmac.compare_digest(found[2], self._tag(found[1], key_id))

    def _tag(self, drawn: str, key_id: str) -> str:
        return hmac.digest(self._secret, f"{drawn}/{key_id}".encode(), "sha256").hex()[:16]
