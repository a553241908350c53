"""Removing what the site's policy forbids, in memory, before anything is written.

Every text a person or a tool wrote passes through: messages, tool calls,
reasoning, feedback, names, task and run ids, labels and metadata of marks. A forbidden field loses its value to the end
of the quotation or of the line: removing too much is the lesser harm. Where
anything was replaced the token ids and log-probs are dropped as well, because
they would spell the removed text; such a trajectory is kept for reading, not for
training.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from edge_node.collecting.trajectory_pb2 import Selection, Trajectory
from edge_node.policy import Redaction

_QUOTED = r"""\"(?:\\.|[^"\\\n])*\"|'(?:\\.|[^'\\\n])*'"""
_ASSIGNS = r"""\\*["']?\s{0,4}(?:(?:[:=>]|\bis\b|\bwas\b)[\s:=>]{0,6}){1,3}"""
_TEXT_FIELDS = ("content", "reasoning", "name", "arguments", "result", "text", "edited_text", "task_id", "run_id")
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "logprobs", "assistant_mask")


def field_pattern(field: str) -> re.Pattern[str]:
    """Matches `field: value`, `x_field = value`, `"field": "value"`, `field is value` and `--field value`."""
    key = rf"[\w-]{{0,40}}{re.escape(field)}[\w-]{{0,40}}"
    return re.compile(rf"(?i)(?P<kept>{key}{_ASSIGNS}|--{key}\s+)(?:{_QUOTED}|[^\n]+)")


class Redactor:
    """Compiled patterns of one policy."""

    def __init__(self, rules: Redaction) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in rules.all_patterns.items()}
        self._patterns |= {field: field_pattern(field) for field in rules.fields}

    def redact(self, trajectory: Trajectory) -> bool:
        """Replace in place and record how often each pattern applied; whether any did."""
        counts: Counter[str] = Counter()
        calls = [call for message in trajectory.messages for call in message.tool_calls]
        for part in (trajectory, *trajectory.messages, *calls, *trajectory.feedback):
            self._clean(part, counts)
        if trajectory.HasField("selection"):
            self._clean_selection(trajectory.selection, counts)
        for name, found in counts.items():
            trajectory.redactions[name] += found
        if counts:
            for field in _TOKEN_FIELDS:
                trajectory.ClearField(field)
        return bool(counts)

    def _clean(self, part: Any, counts: Counter[str]) -> None:
        for field in _TEXT_FIELDS:
            text = getattr(part, field, "")
            if text:
                setattr(part, field, self._cleaned(text, counts))

    def _clean_selection(self, selection: Selection, counts: Counter[str]) -> None:
        selection.reason = self._cleaned(selection.reason, counts)
        selection.labels[:] = [self._cleaned(label, counts) for label in selection.labels]
        for key, value in list(selection.metadata.items()):
            kept, _, cleaned = self._cleaned(f"{key}={value}", counts).partition("=")  # a key names what its value is
            if (kept, cleaned) != (key, value):
                del selection.metadata[key]
                selection.metadata[kept] = cleaned

    def _cleaned(self, text: str, counts: Counter[str]) -> str:
        for name, pattern in self._patterns.items():

            def replaced(match: re.Match[str], name: str = name) -> str:
                kept = match.groupdict().get("kept") or ""
                whole = match.group()[len(kept) :]
                if whole.strip(" '\"") == f"[redacted:{name}]":
                    return match.group()  # cleaned before
                counts[name] += 1
                return f"{kept}[redacted:{name}]"

            text = pattern.sub(replaced, text)
        return text
