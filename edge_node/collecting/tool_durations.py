"""How long an agent's tools took, as a request's metadata says it.

The agent runs the tools and the node keeps the record, so durations travel with the
next request: one metadata value, a JSON object of call id to seconds. Arguments and
results travel in the messages themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

METADATA_KEY = "tool_durations_s"
LONGEST_VALUE = 512
"""Characters OpenAI's API allows a metadata value."""

_LONGEST_S = 1e7


def written(durations_s: Mapping[str, float]) -> str:
    """The metadata value; the latest of `durations_s` (its last entries), as many as fit."""
    kept: dict[str, float] = {}
    for call_id, seconds in reversed(list(durations_s.items())):
        longer = {call_id: round(seconds, 4), **kept}
        if len(json.dumps(longer, separators=(",", ":"))) > LONGEST_VALUE:
            break
        kept = longer
    return json.dumps(kept, separators=(",", ":"))


def read(value: str) -> dict[str, float]:
    """Durations by call id; nothing where the value is not one of ours, for a record is not worth a failed request."""
    if len(value) > LONGEST_VALUE:
        return {}
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    return {
        call_id: float(seconds)
        for call_id, seconds in fields.items()
        if isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and math.isfinite(seconds)
        and 0 <= seconds < _LONGEST_S
    }
