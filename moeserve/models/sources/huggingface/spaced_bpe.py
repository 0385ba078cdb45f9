"""Gemma's form of tokenizer.json: BPE over characters, with spaces replaced by another character and byte tokens as
fallback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import ModelError, SettingError

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_PRE_TOKENIZERS = (None, _AT_SPACES)  # no spaces are left, so the second one splits nothing
_BPE = {  # supported values in `model`
    "type": ("BPE",),
    "dropout": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (True,),
    "ignore_merges": (None, False, True),
}
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Control tokens that parsers of tool calls and reasoning must see: user-defined, as llama.cpp's converter marks
# them.
_VISIBLE = frozenset(
    {
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    }
)
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # tokenizer.ggml.token_type


def is_spaced(tokenizer: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer.json has this form."""
    return tokenizer.get("normalizer") == _SPACES


def check_spaced(path: Path, tokenizer: Mapping[str, Any]) -> None:
    """Raises ModelError for settings that would give other token ids."""
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise ModelError(path, "'model' is not an object; download it again")
    for key, supported in _BPE.items():
        if model.get(key) not in supported:
            raise SettingError(
                path, f"'model' has {key} {model.get(key)!r}; only BPE as Gemma's is supported"
            )
    if tokenizer.get("pre_tokenizer") not in _PRE_TOKENIZERS:
        raise ModelError(path, "its pre_tokenizer is not supported; use a GGUF file of the model")


def spaced_kinds(
    tokens: Sequence[str], kinds: np.ndarray[Any, np.dtype[np.int32]]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns a copy of the tokens' kinds (int32, GGUF's token types) in which byte tokens are marked as bytes, and
    control tokens that may be shown as user-defined."""
    kinds = kinds.copy()
    for token_id, token in enumerate(tokens):
        if token in _BYTES:
            kinds[token_id] = _BYTE
        elif token in _VISIBLE and kinds[token_id] == _CONTROL:
            kinds[token_id] = _USER_DEFINED
    return kinds
