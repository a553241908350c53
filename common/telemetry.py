"""Structured logs without content: one JSON object a line, allow-listed fields only."""

from __future__ import annotations

import json
import logging

ALLOWED_FIELDS = frozenset(
    {"site", "version", "round", "plan", "reason", "count", "seconds", "status", "error"}
    | {"route", "method", "arm", "key", "prompt_tokens", "completion_tokens"}
)
"""Names a log line may carry; never prompts, completions, keys or update values."""


def log_event(logger: logging.Logger, event: str, *, level: int = logging.WARNING, **fields: str | int | float) -> None:
    """Write one event; raises ValueError for a field that is not allow-listed."""
    forbidden = set(fields) - ALLOWED_FIELDS
    if forbidden:
        raise ValueError(f"log fields not allow-listed: {sorted(forbidden)}")
    logger.log(level, json.dumps({"event": event, **fields}, sort_keys=True))
