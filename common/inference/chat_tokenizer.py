"""Chat messages to token ids and back, by the model folder's own template."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from common.chat import Message
from common.errors import ConfigError
from common.inference.model_folder import ModelFolder

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

_UNFINISHED = "�"
_LONGEST_WINDOW, _KEPT_WINDOW = 24, 6

_TOOLS_TURN = """You may call these functions:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON:
<tool_call>
{{"name": "the function's name", "arguments": {{}}}}
</tool_call>"""


class MessagesRefused(ValueError):
    """The model's template cannot write this conversation."""


class ControlTokenInText(MessagesRefused):
    """A message contains a control token of the model, which would forge a turn."""


class ChatTokenizer:
    """The tokenizer and chat template of one model.

    Raises:
        ConfigError: they cannot be loaded, or there is no template.
    """

    def __init__(self, folder: ModelFolder) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
        except Exception as error:  # whatever transformers makes of foreign files
            raise ConfigError(f"the tokenizer in {folder.path} cannot be loaded: {type(error).__name__}") from error
        if not self._tokenizer.chat_template:
            raise ConfigError(f"the tokenizer in {folder.path} has no chat template; use a chat model")
        added = self._tokenizer.added_tokens_decoder.values()
        self._control_tokens = tuple(
            {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        )
        self.pad_id: int = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else 0
        end = self._tokenizer.eos_token_id
        self._end_id: int = end if end in folder.end_tokens else min(folder.end_tokens)
        self._shows_tools = self._shows("probe_tool", [_QUESTION], [_PROBE_TOOL])
        self._shows_calls = self._shows("probe_tool", [_QUESTION, _PROBE_CALL])
        self._shows_results = self._shows("probe result", [_QUESTION, _PROBE_CALL, _PROBE_RESULT])

    def encode(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of the conversation, up to where the assistant's answer begins.

        What the template does not show is written into the text: tools into the system turn, calls into
        the assistant's turn in the form `common.chat` reads, results into a user's turn.

        Args:
            tools: functions the model may call, in the shape of the OpenAI API.
        Raises:
            ControlTokenInText: a message or tool contains one of the model's control tokens.
            MessagesRefused: the template does not take the conversation, for instance its order of roles.
        """
        turns = [self._turn(message) for message in messages]
        described = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        for text in (*described, *(part for message in messages for part in _texts(message))):
            self._refuse_control_tokens(text)
        if tools and not self._shows_tools:
            turns = _with_system_text(turns, _TOOLS_TURN.format(tools="\n".join(described)))
        try:
            text = self._render(turns, tools if self._shows_tools else [])
        except Exception as error:  # a template refuses in its own way
            raise MessagesRefused(f"the model's chat template refuses the messages: {error}"[:300]) from error
        return self.encode_text(text)

    def encode_answer(self, text: str) -> list[int]:
        """Token ids of an answer as the model would have written it, with the token that ends it.

        Raises:
            ControlTokenInText: the text contains one of the model's control tokens.
        """
        self._refuse_control_tokens(text)
        return [*self.encode_text(text), self._end_id]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, without control tokens around it."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without control tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def text_stream(self) -> TextStream:
        """Text of an answer as its tokens arrive."""
        return TextStream(self)

    def definition(self) -> str:
        """The tokenizer with all its added tokens, as the text of a `tokenizer.json`."""
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    def _refuse_control_tokens(self, text: str) -> None:
        found = next((token for token in self._control_tokens if token in text), None)
        if found is not None:
            raise ControlTokenInText(f"message text contains the model's control token {found}")

    def _turn(self, message: Message) -> dict[str, Any]:
        content = message.content or ""
        if message.role == "tool" and not self._shows_results:
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            turn["name"] = message.name
        calls = [{"name": call.name, "arguments": _arguments(call.arguments)} for call in message.tool_calls]
        if calls and self._shows_calls:
            ids = [call.id for call in message.tool_calls]
            turn["tool_calls"] = [
                {"type": "function", "id": id, "function": call} for id, call in zip(ids, calls, strict=True)
            ]
        elif calls:
            written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
            turn["content"] = "\n".join([content, *written] if content else written)
        return turn

    def _render(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(
            list(turns), tools=[dict(tool) for tool in tools] or None, add_generation_prompt=True, tokenize=False
        )

    def _shows(self, marker: str, turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the template puts a part of such a conversation into its text."""
        try:
            return marker in self._render(turns, tools)
        except Exception:  # a template may refuse what it does not know, in its own way
            return False


class TextStream:
    """Tokens in, text out as soon as it is certain: never a part of a character.

    What was pushed and the rest, joined, are what `decode` gives for all tokens.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = ""  # of the window's text

    def push(self, token_id: int) -> str:
        """The text that this token completes, often its own, sometimes none."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_UNFINISHED)  # it may become another character with the next token
        new = certain[len(self._given) :]
        if new:
            self._given = certain
        if len(self._window) > _LONGEST_WINDOW and certain == text:
            self._window = self._window[-_KEPT_WINDOW:]
            self._given = self._tokenizer.decode(self._window)
        return new

    def rest(self) -> str:
        """What is left when no token follows."""
        text = self._tokenizer.decode(self._window)
        new, self._given = text[len(self._given) :], text
        return new


_QUESTION = {"role": "user", "content": "question"}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "probe1234", "function": {"name": "probe_tool", "arguments": {}}}],
}
_PROBE_RESULT = {"role": "tool", "content": "probe result", "name": "probe_tool", "tool_call_id": "probe1234"}


def _texts(message: Message) -> list[str]:
    """Every text of a message that a template may show."""
    calls = [part for call in message.tool_calls for part in (call.id, call.name, _written(call.arguments))]
    return [message.content or "", message.name or "", message.tool_call_id or "", *calls]


def _written(arguments: str) -> str:
    """A call's arguments as a template writes them, where an escaped control token is one again."""
    return json.dumps(_arguments(arguments), ensure_ascii=False)


def _arguments(text: str) -> Any:
    """A call's arguments as templates expect them: an object, or the text where it is none."""
    try:
        found = json.loads(text)
        json.dumps(found)  # nested too deeply to be written again
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _with_system_text(turns: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if turns and turns[0]["role"] == "system":
        first = {**turns[0], "content": f"{turns[0]['content']}\n\n{text}".strip()}
        return [first, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]
