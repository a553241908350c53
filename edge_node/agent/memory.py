"""What of a conversation the model is shown: the system turn, the question at work, and the latest turns.

A tool call is never separated from its results: an API refuses such a conversation,
and a model that saw it would make the missing half up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.chat import Message

_CHARACTERS_PER_TOKEN = 4
_TOKENS_PER_TURN = 8


def estimated_tokens(message: Message) -> int:
    """A rough count for where no tokenizer is at hand: a token per four characters, and eight for the turn."""
    characters = len(message.content or "") + sum(len(c.name) + len(c.arguments) for c in message.tool_calls)
    return _TOKENS_PER_TURN + characters // _CHARACTERS_PER_TOKEN


@dataclass(frozen=True)
class Window:
    """Limits of what is shown; None for no limit.

    Attributes:
        tokens_of: counts one message; give the model's own tokenizer where it is at hand.
    """

    messages: int | None = None
    tokens: int | None = None
    tokens_of: Callable[[Message], int] = estimated_tokens

    def shown(self, conversation: Sequence[Message]) -> list[Message]:
        """The part of a conversation that fits.

        Always shown, whatever they need: the system turns at the start, the last user turn, and the last
        turn with its tool results. Of the rest the latest, without a gap, from a user turn on.
        """
        turns = _turns(conversation)
        head = 0
        while head < len(turns) and turns[head][0].role in ("system", "developer"):
            head += 1
        question = max((i for i, turn in enumerate(turns) if turn[0].role == "user"), default=len(turns) - 1)
        kept = {*range(head), *((question, len(turns) - 1) if turns else ())}
        used = [message for index in kept for message in turns[index]]
        for index in range(len(turns) - 1, head - 1, -1):
            if index in kept:
                continue
            if not self._fits([*used, *turns[index]]):
                break
            used.extend(turns[index])
            kept.add(index)
        first_user = next((i for i in sorted(kept) if turns[i][0].role == "user"), head)
        return [m for i, turn in enumerate(turns) if i in kept and (i < head or i >= first_user) for m in turn]

    def _fits(self, messages: Sequence[Message]) -> bool:
        if self.messages is not None and len(messages) > self.messages:
            return False
        return self.tokens is None or sum(map(self.tokens_of, messages)) <= self.tokens

    def halved(self, conversation: Sequence[Message]) -> Window | None:
        """A window of half of what this one shows of a conversation; None where nothing more can be left out."""
        shown = self.shown(conversation)
        smaller = Window(len(shown) // 2, self.tokens, self.tokens_of)
        return smaller if len(smaller.shown(conversation)) < len(shown) else None


def _turns(conversation: Sequence[Message]) -> list[list[Message]]:
    """Messages that belong together: a turn with tool calls, and the results that follow it."""
    turns: list[list[Message]] = []
    for message in conversation:
        if message.role == "tool" and turns and (turns[-1][0].tool_calls or turns[-1][-1].role == "tool"):
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns
