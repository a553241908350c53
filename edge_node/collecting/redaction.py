"""Removing what the site's policy forbids, in memory, before anything is written.

Text, tool arguments and results, reasoning and feedback all pass through. Where
anything was replaced the token ids and log-probs are dropped as well: they would
spell the removed text. Such a trajectory is kept for reading, not for training.
"""

from __future__ import annotations

import re
from collections import Counter

from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.policy import Redaction


class Redactor:
    """Compiled patterns of one policy."""

    def __init__(self, rules: Redaction) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in rules.patterns.items()}
        for field in rules.fields:
            self._patterns[field] = re.compile(
                rf"(?i)(?P<kept>[\"']?\b{re.escape(field)}\b[\"']?\s*(?:[:=]|\bis\b)\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;}}]+)"
            )

    def redact(self, trajectory: Trajectory) -> None:
        """Replace in place and record how often each pattern applied."""
        counts: Counter[str] = Counter()
        for message in trajectory.messages:
            message.content = self._clean(message.content, counts)
            message.reasoning = self._clean(message.reasoning, counts)
            for call in message.tool_calls:
                call.arguments = self._clean(call.arguments, counts)
                call.result = self._clean(call.result, counts)
        for feedback in trajectory.feedback:
            feedback.text = self._clean(feedback.text, counts)
            feedback.edited_text = self._clean(feedback.edited_text, counts)
        if counts:
            trajectory.redactions.update(counts)
            for field in ("prompt_token_ids", "completion_token_ids", "logprobs", "assistant_mask"):
                trajectory.ClearField(field)

    def _clean(self, text: str, counts: Counter[str]) -> str:
        for name, pattern in self._patterns.items():

            def replaced(match: re.Match[str], name: str = name) -> str:
                kept = match.groupdict().get("kept") or ""
                return f"{kept}[redacted:{name}]"

            text, found = pattern.subn(replaced, text)
            if found:
                counts[name] += found
        return text
