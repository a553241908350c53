"""Removing what the site's policy forbids, in memory, before anything is written.

Every text a person or a tool wrote passes through: messages, tool calls and their ids,
reasoning, feedback, names, task and run ids, labels and metadata of marks. A forbidden field loses its value to the end
of the quotation or of the line: removing too much is the lesser harm. So does what only the token ids spell: the tools
in a prompt, what a stop string cut off. Where anything was found the token ids and
log-probs are dropped, because they would spell the removed text; such a trajectory
is kept for reading, not for training.

Texts come from anyone, so the time of the built-in rules is linear in them: a rule looks for a literal, the
field's name or an `@`, and reads what stands around it once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from edge_node.collecting.trajectory_pb2 import Selection, Trajectory
from edge_node.policy import Redaction

Rule = Callable[[str], Iterator[tuple[int, int]]]
"""Finds what must go from a text: where each part begins and ends, in order, apart from each other."""

_LONGEST_LOCAL_PART = 64
_LOCAL_PART = re.compile(r"[\w.+-]*")
_DOMAIN = re.compile(r"@[\w-]{1,63}+(?:\.[\w-]{1,63}+){1,8}+")

_QUOTED = r"""\"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+\"|'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'"""
_ASSIGNS = r"(?:[:=>]|\bis\b|\bwas\b)[\s:=>]{0,6}"
_NAME = re.compile(r"[\w-]*+")
_VALUE = rf"(?P<value>{_QUOTED}|[^\n]+)"
_ASSIGNED = re.compile(rf"""(?i)\\*+["']?\s{{0,4}}(?:{_ASSIGNS}){{1,3}}{_VALUE}""")
_IS = re.compile(r"(?i)-(?:is|was)(?!\w)")
_AFTER_IS = re.compile(rf"(?i)[\s:=>]{{0,6}}(?:{_ASSIGNS}){{0,2}}{_VALUE}")
_GIVEN = re.compile(rf"\s++{_VALUE}")
_FLAG = re.compile(r"--[\w-]{0,40}\Z")
_LONGEST_FLAG = 42

_TEXT_FIELDS = ("content", "reasoning", "name", "arguments", "result", "text", "edited_text", "task_id", "run_id")
_CALL_FIELDS = ("id", "tool_call_id")
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "logprobs", "assistant_mask")


def email_addresses(text: str) -> Iterator[tuple[int, int]]:
    """Every `local.part@some.domain`."""
    end, domain = 0, _DOMAIN.search(text)
    while domain is not None:
        at, after = domain.start(), domain.start() + 1
        before = text[max(end, at - _LONGEST_LOCAL_PART) : at][::-1]
        length = _matched(_LOCAL_PART, before).end()
        if length:
            end = after = domain.end()
            yield at - length, end
        domain = _DOMAIN.search(text, after)


def values_of(field: str) -> Rule:
    """Finds the values in `field: value`, `x_field = value`, `"field": "value"`, `field is value`, `--field value`."""
    literal = re.compile(re.escape(field), re.IGNORECASE)

    def is_flag(text: str, name: re.Match[str], end: int) -> bool:
        """Whether two dashes stand before the field, in the name it is part of."""
        if _FLAG.search(text[max(0, name.start() - _LONGEST_FLAG) : name.start()]):
            return True
        dashes = text.find("--", name.end(), end)
        return dashes >= 0 and literal.search(text, dashes, end) is not None

    def found(text: str) -> Iterator[tuple[int, int]]:
        name = literal.search(text)
        while name is not None:
            end = _matched(_NAME, text, name.end()).end()  # of the whole name, wherever in it the field stands
            value = _ASSIGNED.match(text, end)
            inside = _IS.search(text, name.end(), end) if value is None else None
            if inside is not None:
                value = _AFTER_IS.match(text, inside.end())
            if value is None and is_flag(text, name, end):
                value = _GIVEN.match(text, end)
            if value is not None:
                yield value.span("value")
                end = value.end()
            name = literal.search(text, end)

    return found


def matches_of(pattern: str) -> Rule:
    """Finds what a site's own pattern matches; of a group `kept` at its beginning only what follows."""
    compiled = re.compile(pattern)

    def found(text: str) -> Iterator[tuple[int, int]]:
        for match in compiled.finditer(text):
            kept = match.groupdict().get("kept") or ""
            if match.end() > match.start() + len(kept):
                yield match.start() + len(kept), match.end()

    return found


class Redactor:
    """The rules of one policy.

    Args:
        decode: text of token ids, as the tokenizer that made them reads them.
    """

    def __init__(self, rules: Redaction, *, decode: Callable[[Sequence[int]], str]) -> None:
        self._rules: dict[str, Rule] = {"email": email_addresses}
        self._rules |= {name: matches_of(pattern) for name, pattern in rules.patterns.items()}
        self._rules |= {field: values_of(field) for field in rules.fields}
        self._decode = decode

    def redact(self, trajectory: Trajectory) -> bool:
        """Replace in place and record how often each rule applied; whether any did."""
        return self.redact_all([trajectory])

    def redact_all(self, trajectories: Iterable[Trajectory]) -> bool:
        """`redact` the answers to one request: what they share is read once; whether any rule applied."""
        reading = _Reading(self._rules, self._decode)
        found = [reading.redact(trajectory) for trajectory in trajectories]
        return any(found)


class _Reading:
    """One pass over the answers to one request."""

    def __init__(self, rules: dict[str, Rule], decode: Callable[[Sequence[int]], str]) -> None:
        self._rules = rules
        self._decode = decode
        self._texts: dict[str, tuple[str, Counter[str]]] = {}
        self._tokens: dict[tuple[int, ...], Counter[str]] = {}

    def redact(self, trajectory: Trajectory) -> bool:
        counts: Counter[str] = Counter()
        calls = [call for message in trajectory.messages for call in message.tool_calls]
        for part in (trajectory, *trajectory.messages, *calls, *trajectory.feedback):
            self._clean(part, _TEXT_FIELDS, counts)
        for part in (*trajectory.messages, *calls):
            self._clean(part, _CALL_FIELDS, counts)
        if trajectory.HasField("selection"):
            self._clean_selection(trajectory.selection, counts)
        for ids in (trajectory.prompt_token_ids, trajectory.completion_token_ids):
            if not counts:
                counts += self._spelt(tuple(ids))
        for name, found in counts.items():
            trajectory.redactions[name] += found
        if counts:
            for field in _TOKEN_FIELDS:
                trajectory.ClearField(field)
        return bool(counts)

    def _spelt(self, ids: tuple[int, ...]) -> Counter[str]:
        """How often each rule applies to what token ids spell."""
        if ids not in self._tokens:
            self._tokens[ids] = self._read(self._decode(ids))[1]
        return self._tokens[ids]

    def _clean(self, part: Any, fields: Sequence[str], counts: Counter[str]) -> None:
        for field in fields:
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
        cleaned, found = self._read(text)
        counts += found
        return cleaned

    def _read(self, text: str) -> tuple[str, Counter[str]]:
        """The text without what the rules find, and how often each applied."""
        if text not in self._texts:
            counts: Counter[str] = Counter()
            cleaned = text
            for name, rule in self._rules.items():
                cleaned = _without(cleaned, name, rule, counts)
            self._texts[text] = cleaned, counts
        return self._texts[text]


def _without(text: str, name: str, rule: Rule, counts: Counter[str]) -> str:
    parts, kept_from = [], 0
    for start, end in rule(text):
        if text[start:end].strip(" '\"") == f"[redacted:{name}]":
            continue  # cleaned before
        counts[name] += 1
        parts += [text[kept_from:start], f"[redacted:{name}]"]
        kept_from = end
    return "".join([*parts, text[kept_from:]])


def _matched(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str]:
    match = pattern.match(text, start)
    assert match is not None  # it may match nothing
    return match
