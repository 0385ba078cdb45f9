"""Translates tokenizer.json and related files to GGUF's metadata keys, as llama.cpp's converter writes them.

Supported: byte-level BPE with a split expression of `sources/splits.py`, and Gemma's BPE over characters
(spaced_bpe.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf.metadata import MetadataValue, StringArray
from moeserve.models.sources.json_files import read_json, read_text
from moeserve.models.sources.splits import BY_EXPRESSIONS, GPT2, Split

from .spaced_bpe import check_spaced, is_spaced, spaced_kinds

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
MAX_VOCAB = 1 << 22

# The expression matches words: its matches are isolated, or everything else (nothing) is removed.
_SPLIT_STEPS = [
    {"type": "Split", "behavior": "Isolated", "invert": False},
    {"type": "Split", "behavior": "Removed", "invert": True},
]
_DIGITS_STEP = {"type": "Digits", "individual_digits": True}
_NO_NORMALIZERS = (None, {"type": "Sequence", "normalizers": []})
# tokenizer.json's settings about offsets do not affect ids.
_BYTES_STEP = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_BPE = {  # supported values in `model`
    "type": ("BPE",),
    "dropout": (None,),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False, True),
}
_DEFAULT = "default"
# Suffix of a GGUF's key, by Hugging Face's template name.
_TEMPLATE_SUFFIXES = {_DEFAULT: "", "tool_use": ".tool_use"}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


class StringList(StringArray):
    """Strings in memory, for a Metadata."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings

    def __len__(self) -> int:
        return len(self._strings)

    def __iter__(self) -> Iterator[bytes]:
        return (string.encode("utf-8") for string in self._strings)


def read_tokenizer(folder: Path, config: Mapping[str, Any], vocab_size: int) -> dict[str, MetadataValue]:
    """Returns the tokenizer and the chat template as GGUF's metadata. vocab_size: rows of the embedding. Raises
    ModelError for a missing or damaged file and for a tokenizer that is not supported."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            path, "is missing; save the tokenizer in this form with transformers' save_pretrained"
        )
    tokenizer = read_json(path)
    settings = _optional(folder / "tokenizer_config.json")
    values: dict[str, MetadataValue] = {}
    if is_spaced(tokenizer):
        check_spaced(path, tokenizer)
        tokens, kinds = _tokens(path, tokenizer, vocab_size)
        kinds = spaced_kinds(tokens, kinds)
        values["tokenizer.ggml.model"] = "gemma4"
    else:
        _check_kind(path, tokenizer)
        split = _split(path, tokenizer)
        tokens, kinds = _tokens(path, tokenizer, vocab_size)
        values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split.names[0]}
        values["tokenizer.normalizer"] = _normalizer(tokenizer, settings)
    values |= {
        "tokenizer.ignore_merges": bool(tokenizer["model"].get("ignore_merges")),
        "tokenizer.ggml.tokens": StringList(tokens),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": StringList(_merges(path, tokenizer)),
    }
    values |= _special_tokens(folder / "tokenizer_config.json", settings, tokens)
    values |= _end_tokens(folder, config, vocab_size)
    for name, template in _chat_templates(folder, settings).items():
        values["tokenizer.chat_template" + _TEMPLATE_SUFFIXES[name]] = template
    return values


def _normalizer(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Returns the normaliser. transformers' Qwen2Tokenizer uses NFC even if tokenizer.json, as transformers 5 writes
    it, has none."""
    is_qwen2 = str(settings.get("tokenizer_class")).removesuffix("Fast") == "Qwen2Tokenizer"
    return "NFC" if is_qwen2 or tokenizer.get("normalizer") not in _NO_NORMALIZERS else "none"


def _check_kind(path: Path, tokenizer: Mapping[str, Any]) -> None:
    model = _dict(path, tokenizer, "model")
    for key, supported in _BPE.items():
        if model.get(key) not in supported:
            raise SettingError(
                path,
                f"'model' has {key} {model.get(key)!r}; byte-level BPE as Qwen's, or Gemma's form, is expected",
            )
    if tokenizer.get("normalizer") not in (*_NO_NORMALIZERS, {"type": "NFC"}):
        raise SettingError(
            path, f"normalizer {tokenizer['normalizer']!r} is not supported; only NFC or none is"
        )


def _split(path: Path, tokenizer: Mapping[str, Any]) -> Split:
    """Returns the split. Raises ModelError for a pre_tokenizer that is not in `sources/splits.py`."""
    pre = tokenizer.get("pre_tokenizer")
    steps = pre.get("pretokenizers") if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    split = None
    if isinstance(steps, list) and steps and all(isinstance(step, dict) for step in steps):
        split = _split_of(steps[:-1], steps[-1])
    if split is None:
        raise ModelError(path, "its pre_tokenizer is not supported; use a GGUF file of the model")
    return split


def _split_of(cuts: list[dict[str, Any]], to_bytes: dict[str, Any]) -> Split | None:
    cuts = [_digits_as_split(cut) for cut in cuts]
    if to_bytes.get("use_regex", True):
        cuts.append(_SPLIT_STEPS[0] | {"pattern": {"Regex": GPT2.expression}})
        to_bytes = to_bytes | {"use_regex": False}
    # A step that removes what it does not match would change the text for the next step.
    forms = _SPLIT_STEPS if len(cuts) == 1 else _SPLIT_STEPS[:1]
    if not all(any(cut.items() >= wanted.items() for wanted in forms) for cut in cuts):
        return None
    if not to_bytes.items() >= _BYTES_STEP.items():
        return None
    patterns = [cut.get("pattern") for cut in cuts]
    expressions = [pattern.get("Regex") if isinstance(pattern, dict) else None for pattern in patterns]
    known = tuple(e for e in expressions if isinstance(e, str))
    return BY_EXPRESSIONS.get(known) if len(known) == len(cuts) else None


def _digits_as_split(cut: dict[str, Any]) -> dict[str, Any]:
    if cut.items() >= _DIGITS_STEP.items():
        return _SPLIT_STEPS[0] | {"pattern": {"Regex": r"\p{N}"}}
    return cut


def _tokens(
    path: Path, tokenizer: Mapping[str, Any], size: int
) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int32]]]:
    """Returns the text and kind of each id below `size`. The embedding may have more rows than tokens; such ids get
    unique names and are never generated."""
    if not 1 <= size <= MAX_VOCAB:
        raise SettingError(
            path.with_name("config.json"), f"vocab_size is {size}; 1 to {MAX_VOCAB} is supported"
        )
    pieces: dict[int, str] = {}
    kinds = np.full(size, UNUSED, np.int32)
    for piece, token_id in _dict(path, _dict(path, tokenizer, "model"), "vocab").items():
        kinds[_place(path, pieces, size, token_id, piece)] = NORMAL
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise ModelError(path, "'added_tokens' is not a list; download it again")
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise SettingError(path, f"'added_tokens' holds {str(token)[:80]!r}, which is not a token")
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise SettingError(path, f"token {token['content']!r} has {flag}, which is not supported")
        place = _place(path, pieces, size, token.get("id"), token["content"])
        kinds[place] = CONTROL if token.get("special") else USER_DEFINED
    return [pieces.get(token_id, f"[PAD{token_id}]") for token_id in range(size)], kinds


def _place(path: Path, pieces: dict[int, str], size: int, token_id: object, piece: str) -> int:
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < size:
        raise SettingError(
            path, f"token {piece!r} has id {token_id!r}; the model's embedding has {size} rows"
        )
    if pieces.setdefault(token_id, piece) != piece:
        raise SettingError(path, f"tokens {pieces[token_id]!r} and {piece!r} have the same id, {token_id}")
    return token_id


def _merges(path: Path, tokenizer: Mapping[str, Any]) -> list[str]:
    """Returns merges: pairs, or texts with a blank in between (tokenizers before 0.20); no token contains a blank."""
    merges = _dict(path, tokenizer, "model").get("merges")
    if not isinstance(merges, list):
        raise ModelError(path, "'model' has no list of merges; download it again")
    texts = [" ".join(map(str, merge)) if isinstance(merge, list) else merge for merge in merges]
    if not all(isinstance(text, str) for text in texts):
        raise ModelError(path, "'merges' holds something that is not a pair of strings; download it again")
    return texts


def _special_tokens(path: Path, settings: Mapping[str, Any], tokens: list[str]) -> dict[str, MetadataValue]:
    """Returns the special tokens of templates (bos_token and so on), and whether a text starts with BOS."""
    values: dict[str, MetadataValue] = {}
    for theirs, ours in _SPECIAL.items():
        given = settings.get(theirs)
        text = given.get("content") if isinstance(given, dict) else given
        if text is None:
            continue
        if text not in tokens:
            raise SettingError(path, f"{theirs} is {text!r}, which is not a token of tokenizer.json")
        values[f"tokenizer.ggml.{ours}_token_id"] = tokens.index(text)
    if settings.get("add_bos_token"):
        values["tokenizer.ggml.add_bos_token"] = settings["add_bos_token"]
    return values


def _end_tokens(folder: Path, config: Mapping[str, Any], size: int) -> dict[str, MetadataValue]:
    """Returns the end tokens, one or several, from generation_config.json, else config.json."""
    path, key = folder / "generation_config.json", "tokenizer.generation_end_ids"
    given = _optional(path).get("eos_token_id")
    if given is None or given == []:
        path, key = folder / "config.json", "tokenizer.config_end_ids"
        given = config.get("eos_token_id")
    if given is None or given == []:
        return {}
    ids = given if isinstance(given, list) else [given]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size for i in ids):
        raise SettingError(
            path, f"eos_token_id is {given!r}; a token id below {size}, or a list of them, is expected"
        )
    return {key: np.array(ids, np.int64)}


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the supported templates by name, with transformers' precedence: chat_template.jinja with
    additional_chat_templates, chat_template.json, tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        others = {name: folder / "additional_chat_templates" / f"{name}.jinja" for name in _TEMPLATE_SUFFIXES}
        files = others | {_DEFAULT: jinja}
        return {name: read_text(file) for name, file in files.items() if file.exists()}
    given = _optional(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(given, list):
        entries = [one for one in given if isinstance(one, dict) and isinstance(one.get("name"), str)]
        named = {one["name"]: one.get("template") for one in entries}
    else:
        named = {} if given is None else {_DEFAULT: given}
    found: dict[str, str] = {}
    for name in _TEMPLATE_SUFFIXES:
        template = named.get(name)
        if isinstance(template, str):
            found[name] = template
        elif template is not None:
            raise SettingError(folder / "tokenizer_config.json", "its chat_template is not text")
    return found


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _dict(path: Path, parent: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise ModelError(path, f"{key!r} is not an object; download it again")
    return value
