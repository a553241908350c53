"""The tokenizer and chat template of a GGUF file as Hugging Face files.

Byte-level BPE whose way of splitting text is known is built from the file's own
tokens and merges; anything else goes through transformers' own reading of GGUF.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from common.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splits(digits: str) -> pre_tokenizers.PreTokenizer:
    """Words, runs of at most so many digits, punctuation and white space; how Llama 3 and Qwen split text."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer | None:
    """How text is split before merging, by the file's `tokenizer.ggml.pre`; None where it is not known here."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match kind:
        case "gpt-2":
            return byte_level
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "qwen2":
            return _splits("")
        case "llama-bpe" | "llama3" | "llama-v3":
            return _splits("{1,3}")
        case _:
            return None


def write_tokenizer(fields: dict[str, Any], file: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file's fields into a model folder.

    Raises:
        ConfigError: it has no chat template, or is not a tokenizer.
    """
    template = fields.get("tokenizer.chat_template")
    if not template:
        raise ConfigError(f"{file} has no chat template; use a chat model")
    kind = fields.get("tokenizer.ggml.pre", "default")
    splitting = _pre_tokenizer(kind) if fields.get("tokenizer.ggml.model") == "gpt2" else None
    if splitting is None:
        _through_transformers(file, folder)
    else:
        _byte_level(fields, kind, splitting, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level(fields: dict[str, Any], kind: str, splitting: pre_tokenizers.PreTokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens):
        raise ConfigError("the GGUF file's tokens are not distinct, or their kinds do not match them")
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", [])]
    try:
        bpe = models.BPE(vocabulary, merges, ignore_merges=kind.startswith("llama"))
    except Exception as error:  # the library raises its base class
        raise ConfigError(f"the GGUF file's merges do not fit its tokens: {error}"[:300]) from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for special, of_kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == of_kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    named = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if fields.get(f"tokenizer.ggml.{key}_token_id") is not None
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def _through_transformers(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True).save_pretrained(folder)
