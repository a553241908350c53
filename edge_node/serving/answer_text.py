"""Reading an answer as it is generated: stop strings, thoughts, tool calls, and what is left to say.

What is passed out never has to be taken back: text that may turn out to be the
beginning of a mark or of a stop string is held until it is known. How the text
was cut into pieces changes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from common.chat import CALL_CLOSES, CALL_OPENS, ToolCall, parse_tool_call

THOUGHT_OPENS, THOUGHT_CLOSES = "<think>", "</think>"


@dataclass(frozen=True)
class Said:
    """Content to show."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Reasoning, which is kept apart from what is said."""

    text: str


Piece = Said | Thought | ToolCall


class StopStrings:
    """Passes text on up to the stop string that is complete first, and of those the longest.

    `released` counts the characters passed on, `found` says that a stop string came.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.released = 0
        self.found = False

    def push(self, text: str) -> str:
        """What can be passed on now."""
        if self.found:
            return ""
        self._held += text
        found = [(place + len(s), place) for s in self._strings if (place := self._held.find(s)) >= 0]
        if found:
            self.found = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - longest_beginning(self._held, self._strings))

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, count: int) -> str:
        passed, self._held = self._held[:count], self._held[count:]
        self.released += count
        return passed


def longest_beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of one of `marks`."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class _State(Enum):
    START = auto()
    THOUGHT = auto()
    AFTER_THOUGHT = auto()
    SAID = auto()
    CALL = auto()


class TurnReader:
    """Splits an assistant's text into thoughts, content and tool calls.

    A call that cannot be made stays content, marks and all, so that nothing the
    model wrote is lost. White space around thoughts and before calls belongs to
    the marks and is dropped.

    Args:
        tools: whether calls are read; without tools their marks are plain text.
        thinking: the prompt has already opened a thought.
        plain: the text is no turn, all of it is content.
    """

    def __init__(self, *, tools: bool, thinking: bool = False, plain: bool = False) -> None:
        self._tools = tools
        self._state = _State.SAID if plain else _State.THOUGHT if thinking else _State.START
        self._pending = ""
        self._gap = ""  # white space before a call, which is content if the call is none
        self._thought_began = False
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        return _joined(self._read())

    def rest(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        pending, self._pending = self._pending, ""
        if self._state is _State.THOUGHT:
            return _joined([Thought(pending.rstrip())])
        if self._state is _State.CALL:
            return _joined([Said(self._gap + CALL_OPENS + pending)])
        if self.calls and not pending.strip():
            return []
        return _joined([Said(pending)])

    def _read(self) -> Iterator[Piece]:
        while True:
            state = self._state
            yield from self._STEPS[state](self)
            if self._state is state:
                return

    def _start(self) -> Iterator[Piece]:
        begun = self._pending.lstrip()
        if begun.startswith(THOUGHT_OPENS):
            self._pending = begun.removeprefix(THOUGHT_OPENS)
            self._state = _State.THOUGHT
        elif not THOUGHT_OPENS.startswith(begun):
            self._state = _State.SAID
        yield from ()

    def _thought(self) -> Iterator[Piece]:
        if not self._thought_began:
            self._pending = self._pending.lstrip()
            self._thought_began = bool(self._pending)
        text, closed, after = self._pending.partition(THOUGHT_CLOSES)
        if closed:
            yield Thought(text.rstrip())
            self._pending, self._state = after, _State.AFTER_THOUGHT
        else:
            sure = _sure(self._pending, THOUGHT_CLOSES)
            yield Thought(self._pending[:sure])
            self._pending = self._pending[sure:]

    def _after_thought(self) -> Iterator[Piece]:
        self._pending = self._pending.lstrip()
        if self._pending:
            self._state = _State.SAID
        yield from ()

    def _said(self) -> Iterator[Piece]:
        if not self._tools:
            yield Said(self._pending)
            self._pending = ""
            return
        text, opened, after = self._pending.partition(CALL_OPENS)
        if opened:
            shown = text.rstrip()
            yield Said(shown)
            self._gap, self._pending, self._state = text[len(shown) :], after, _State.CALL
        else:
            sure = _sure(self._pending, CALL_OPENS)
            yield Said(self._pending[:sure])
            self._pending = self._pending[sure:]

    def _call(self) -> Iterator[Piece]:
        body, closed, after = self._pending.partition(CALL_CLOSES)
        if not closed:
            return
        call = parse_tool_call(body)
        if call is None:
            yield Said(self._gap + CALL_OPENS + body + CALL_CLOSES)
        else:
            self.calls += 1
            yield ToolCall(f"call_{uuid.uuid4().hex}", *call)
        self._pending, self._state = after, _State.SAID

    _STEPS: ClassVar[dict[_State, Callable[[TurnReader], Iterator[Piece]]]] = {
        _State.START: _start,
        _State.THOUGHT: _thought,
        _State.AFTER_THOUGHT: _after_thought,
        _State.SAID: _said,
        _State.CALL: _call,
    }


def _sure(text: str, mark: str) -> int:
    """How much of `text` comes for certain before `mark` and the white space in front of it."""
    return len(text[: len(text) - longest_beginning(text, [mark])].rstrip())


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece; empty ones left out."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            joined.append(piece)
        elif piece.text and joined and type(joined[-1]) is type(piece):
            last = joined.pop()
            assert not isinstance(last, ToolCall)
            joined.append(type(piece)(last.text + piece.text))
        elif piece.text:
            joined.append(piece)
    return joined
