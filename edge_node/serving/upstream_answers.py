"""What an upstream server answers, streamed or whole, as ours.

Only what the server says is recorded. Token ids come from the server, or, where it
gives none, from this node's own tokenizer, and then without log-probabilities: a
record of what was asked and said, and none of how likely it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.chat import CALL_CLOSES, CALL_OPENS, Message, ToolCall
from common.inference.batching import Generation
from common.inference.chat_tokenizer import ChatTokenizer, ControlTokenInText
from common.inference.engine import GenerationFailed
from edge_node.serving.answer_text import THOUGHT_CLOSES, THOUGHT_OPENS
from edge_node.serving.exchange import Answer, ChatRequest, Delta, TokenLogprob

_FINISHED = frozenset({"stop", "length", "tool_calls"})


@dataclass
class Gathering:
    """One choice as it comes in.

    Attributes:
        keeps_logprobs: whether the server's log-probabilities are those of the distribution it draws from.
        vocabulary: token ids are below it.
    """

    index: int
    request: ChatRequest
    keeps_logprobs: bool
    vocabulary: int
    started: float = field(default_factory=time.monotonic)
    first: float = 0.0
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, choice: Any, said: Any) -> Delta:
        """Take a choice of a response and what it says (its message, or a delta of it)."""
        content = _text(getattr(said, "content", None))
        reasoning = _text(getattr(said, "reasoning", None) or getattr(said, "reasoning_content", None))
        for place, part in enumerate(getattr(said, "tool_calls", None) or ()):
            self._add_call(getattr(part, "index", place), part)
        return self._take(choice, content, reasoning, _chat_logprobs(choice))

    def add_text(self, choice: Any) -> Delta:
        """Take a choice of a plain completion."""
        return self._take(choice, _text(choice.text), "", _completion_logprobs(choice))

    def _take(self, choice: Any, content: str, reasoning: str, logprobs: Sequence[TokenLogprob]) -> Delta:
        token_ids = getattr(choice, "token_ids", None) or ()
        if (content or reasoning or token_ids) and not self.first:
            self.first = time.monotonic()
        self.content.append(content)
        self.reasoning.append(reasoning)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        calls: tuple[ToolCall, ...] = ()
        if choice.finish_reason is not None:
            calls = self._calls()
            self.finish_reason = "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason
        shown = tuple(logprobs) if self.request.logprobs else ()
        return Delta(self.index, content, reasoning, calls, shown, self.finish_reason or None)

    def _add_call(self, place: int, part: Any) -> None:
        call = self.calls.setdefault(place, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or _text(part.id)
        if part.function is not None:
            call["name"] += _text(part.function.name)
            call["arguments"] += _text(part.function.arguments)

    def _calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(c["id"], c["name"], c["arguments"]) for _, c in sorted(self.calls.items()))

    def answer(self, tokenizer: ChatTokenizer) -> Answer:
        """The whole choice.

        Raises:
            GenerationFailed: it was not finished.
        """
        if self.finish_reason not in _FINISHED:
            raise GenerationFailed("the model server's answer broke off")
        content, reasoning, calls = "".join(self.content), "".join(self.reasoning), self._calls()
        said = None if calls and not content else content
        message = Message("assistant", said, tool_calls=calls, reasoning=reasoning or None)
        text = _as_written(content, reasoning, calls)
        shown = tuple(self.logprobs) if self.request.logprobs else ()
        return Answer(text, self._generation(text, tokenizer), message, self.finish_reason, shown)

    def _generation(self, text: str, tokenizer: ChatTokenizer) -> Generation:
        now = time.monotonic()
        spelled = [*self.content, *self.reasoning, *(call.name for call in self._calls())]
        usable = all(0 <= token_id < self.vocabulary for token_id in self.token_ids) and spells(
            tokenizer, self.token_ids, spelled
        )
        token_ids = self.token_ids if usable else _encoded(text, tokenizer)
        known = usable and self.keeps_logprobs and len(self.logprobs) == len(token_ids)
        return Generation(
            token_ids,
            [entry.logprob for entry in self.logprobs] if known else [],
            "stop" if self.finish_reason == "tool_calls" else self.finish_reason,
            wait_s=0.0,
            first_token_s=(self.first or now) - self.started,
            decode_s=now - (self.first or now),
        )


def spells(tokenizer: ChatTokenizer, token_ids: Sequence[int], texts: Sequence[str]) -> bool:
    """Whether these are ids of this node's tokenizer for text that has all of `texts` in it, spaces aside.

    Another tokenizer's ids may all be below the same vocabulary and mean something else.
    """
    decoded = "".join(tokenizer.decode(token_ids).split())
    return bool(token_ids) and all("".join(text.split()) in decoded for text in texts)


def _as_written(content: str, reasoning: str, calls: Sequence[ToolCall]) -> str:
    """The answer as a model of this form writes it; the server has taken it apart."""
    thoughts = f"{THOUGHT_OPENS}{reasoning}{THOUGHT_CLOSES}\n" if reasoning else ""
    written = (f'{CALL_OPENS}{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}{CALL_CLOSES}' for c in calls)
    return thoughts + "\n".join([content, *written] if content or not calls else written)


def _encoded(text: str, tokenizer: ChatTokenizer) -> list[int]:
    try:
        return tokenizer.encode_answer(text)
    except ControlTokenInText:
        return []


def _chat_logprobs(choice: Any) -> list[TokenLogprob]:
    entries = getattr(choice.logprobs, "content", None) if choice.logprobs is not None else None

    def named(entry: Any, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = getattr(entry, "bytes", None)
        return TokenLogprob(_text(entry.token), None if raw is None else bytes(raw), float(entry.logprob), top)

    return [named(e, tuple(named(t) for t in getattr(e, "top_logprobs", None) or ())) for e in entries or ()]


def _completion_logprobs(choice: Any) -> list[TokenLogprob]:
    said = choice.logprobs
    if said is None or not said.tokens:
        return []
    tops = said.top_logprobs or [None] * len(said.tokens)
    return [
        TokenLogprob(
            token,
            token.encode("utf-8", "replace"),
            float(logprob),
            tuple(TokenLogprob(t, t.encode("utf-8", "replace"), float(p)) for t, p in (top or {}).items()),
        )
        for token, logprob, top in zip(said.tokens, said.token_logprobs or (), tops, strict=True)
    ]


def _text(value: Any) -> str:
    """A text, made sendable: a server may escape half of a surrogate pair."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError("a text of the answer is none")
    return value.encode("utf-8", "replace").decode()
