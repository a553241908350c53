"""Chat messages to token ids and back, by the model folder's own template."""

from __future__ import annotations

import os
from collections.abc import Sequence

from common.chat import Message
from common.errors import ConfigError
from common.inference.model_folder import ModelFolder

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


class ControlTokenInText(ValueError):
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

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, up to where the assistant's answer begins.

        Raises:
            ControlTokenInText: a message's text contains one of the model's control tokens.
        """
        for message in messages:
            self._refuse_control_tokens(message.content or "")
        text = self._tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content or ""} for m in messages],
            add_generation_prompt=True,
            tokenize=False,
        )
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

    def _refuse_control_tokens(self, text: str) -> None:
        found = next((token for token in self._control_tokens if token in text), None)
        if found is not None:
            raise ControlTokenInText(f"message text contains the model's control token {found}")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without control tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
