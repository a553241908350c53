"""One choice of an answer as it is written: read on the engine's thread, told to the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.chat import Message, ToolCall
from common.inference.batching import Generation, Token
from common.inference.chat_tokenizer import ChatTokenizer
from edge_node.serving.answer_text import Piece, Said, StopStrings, Thought, TurnReader
from edge_node.serving.exchange import Answer, ChatRequest, Delta, TokenLogprob


class Writer:
    """Follows the tokens of one choice.

    `watch` runs on the engine's thread, `finish` afterwards on the event loop's.

    Args:
        thinking: the prompt has already opened a thought.
        emit: takes each delta as it comes, where the answer is streamed.
    """

    def __init__(
        self,
        index: int,
        request: ChatRequest,
        tokenizer: ChatTokenizer,
        thinking: bool,
        emit: Callable[[Delta], None] | None = None,
    ) -> None:
        self.left = False
        self._index = index
        self._request = request
        self._tokenizer = tokenizer
        self._emit = emit
        tools = bool(request.tools) and request.tool_choice.mode != "none"
        self._reads = emit is not None or bool(request.stop)
        self._decoder = tokenizer.text_stream()
        self._stop = StopStrings(request.stop)
        self._reader = TurnReader(tools=tools, thinking=thinking, plain=request.prompt is not None)
        self._text: list[str] = []
        self._pieces: list[Piece] = []
        self._decoded = 0  # characters
        self._unreleased: list[tuple[int, TokenLogprob]] = []  # with the place in the text where each token ends
        self._logprobs: list[TokenLogprob] = []
        self._generation: Generation | None = None
        self._finish_reason = ""

    def watch(self, token: Token) -> str | None:
        """See one token; the finish reason where the answer ends with it."""
        if self.left:
            return "cancelled"
        if not self._reads:
            return None
        pieces = self._read(self._decoder.push(token.id))
        logprobs = self._release([token])
        if self._emit is not None and (pieces or logprobs):
            self._emit(self._delta(pieces, logprobs))
        return "stop" if self._stop.found else None

    def finish(self, generation: Generation) -> Delta:
        """Read what is left; the last delta."""
        self._generation = generation
        if self._reads:
            pieces, logprobs = self._read(self._decoder.rest()), []
        else:
            pieces = self._read(self._tokenizer.decode(generation.token_ids))
            tops = generation.tops or [()] * len(generation.token_ids)
            logprobs = self._release(
                [Token(*drawn) for drawn in zip(generation.token_ids, generation.logprobs, tops, strict=True)]
            )
        rest = self._stop.rest()
        self._text.append(rest)
        more = [*self._reader.push(rest), *self._reader.rest()]
        self._pieces += more
        if not self._stop.found:
            released = [entry for _, entry in self._unreleased]
            self._logprobs += released
            logprobs = [*logprobs, *released]
        reason = generation.finish_reason
        self._finish_reason = "tool_calls" if self._reader.calls and reason == "stop" else reason
        return self._delta([*pieces, *more], logprobs, self._finish_reason)

    def answer(self) -> Answer:
        """The whole choice; `finish` came before."""
        assert self._generation is not None
        content = "".join(piece.text for piece in self._pieces if isinstance(piece, Said))
        thoughts = "".join(piece.text for piece in self._pieces if isinstance(piece, Thought))
        calls = tuple(piece for piece in self._pieces if isinstance(piece, ToolCall))
        said = None if calls and not content else content
        message = Message("assistant", said, tool_calls=calls, reasoning=thoughts or None)
        return Answer("".join(self._text), self._generation, message, self._finish_reason, tuple(self._logprobs))

    def _read(self, text: str) -> list[Piece]:
        self._decoded += len(text)
        passed = self._stop.push(text)
        self._text.append(passed)
        pieces = self._reader.push(passed)
        self._pieces += pieces
        return pieces

    def _release(self, tokens: Sequence[Token]) -> list[TokenLogprob]:
        """Log-probabilities of tokens whose text has been passed on, so that they tell no more than the text."""
        if not self._request.logprobs:
            return []
        self._unreleased += [(self._decoded, _token_logprob(self._tokenizer, token)) for token in tokens]
        released = [entry for end, entry in self._unreleased if end <= self._stop.released]
        self._unreleased = self._unreleased[len(released) :]
        self._logprobs += released
        return released

    def _delta(
        self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob], finish_reason: str | None = None
    ) -> Delta:
        return Delta(
            self._index,
            "".join(piece.text for piece in pieces if isinstance(piece, Said)),
            "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
            tuple(piece for piece in pieces if isinstance(piece, ToolCall)),
            tuple(logprobs),
            finish_reason,
        )


def _token_logprob(tokenizer: ChatTokenizer, token: Token) -> TokenLogprob:
    def named(token_id: int, logprob: float) -> TokenLogprob:
        text = tokenizer.decode([token_id])
        return TokenLogprob(text, None if "\ufffd" in text else text.encode(), logprob)

    chosen = named(token.id, token.logprob)
    top = tuple(named(*likely) for likely in token.top)
    return TokenLogprob(chosen.token, chosen.bytes, chosen.logprob, top)
