"""The bytes and the kind of each token id: all that a detokenizer needs, without a tokenizer.

Byte-level BPE writes a token's raw bytes as printable characters, one each (GPT-2's table, "Ġ" for a space); control
and user-defined tokens are plain text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeserve.models.errors import ModelError
from moeserve.models.sources.source import ModelSource
from moeserve.models.sources.splits import SPLITS

from .known_tokens import BYTE, CONTROL, TEXT_ENDS, UNKNOWN, UNUSED, USER_DEFINED, known_kinds, turn_ends

MAX_VOCAB = 1 << 22
MAX_TOKEN_BYTES = 1 << 16  # of one token; the longest tokens in use have hundreds

# `tokenizer.ggml.model` of vocabularies in SentencePiece's spelling.
SPACED_MODEL = "gemma4"  # with merges
SENTENCEPIECE_MODEL = "llama"  # with scores
SPACE = "\u2581"  # stands for a space
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}

_TOKENS = "tokenizer.ggml.tokens"
_ADD_BOS = "tokenizer.ggml.add_bos_token"
_PRE = "tokenizer.ggml.pre"
_BATCH = 8192  # tokens decoded at a time

_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Only from a Hugging Face folder, which may name any number of end tokens. Those of its generation_config.json are all
# ends of a text.
_GENERATION_ENDS = "tokenizer.generation_end_ids"
_CONFIG_ENDS = "tokenizer.config_end_ids"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_bytes[id]: the bytes that the token adds to the text; by themselves often invalid UTF-8."""

    token_bytes: list[bytes]
    special: frozenset[int]  # control tokens: left out of the text by skip_special_tokens
    user_defined: frozenset[int]  # matched whole in input text like control tokens, but part of the text
    unused: frozenset[int]  # pads the embedding; never encoded
    eos_ids: tuple[int, ...]  # a request ends at any of these; the first is the one the file names
    bos_id: int | None
    add_bos: bool

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    @classmethod
    def from_gguf(cls, gguf: ModelSource) -> Vocabulary:
        """Reads a model's tokens and their kinds. Raises ModelError if they are missing or malformed."""
        metadata = gguf.metadata
        size = vocab_size(gguf)
        kinds = _corrected(gguf, metadata.require_ints("tokenizer.ggml.token_type", size))
        spaced = is_spaced(gguf)
        is_literal = np.isin(kinds, (CONTROL, USER_DEFINED, UNUSED))
        token_bytes: list[bytes] = []
        for pieces in read_pieces(gguf):
            part = slice(len(token_bytes), len(token_bytes) + len(pieces))
            token_bytes += (
                _spaced_bytes(gguf, pieces, kinds[part]) if spaced else _raw_bytes(pieces, is_literal[part])
            )
        longest = max(range(size), key=lambda token_id: len(token_bytes[token_id]))
        if len(token_bytes[longest]) > MAX_TOKEN_BYTES:
            raise metadata.error(
                _TOKENS,
                f"token {longest} has {len(token_bytes[longest])} bytes; {MAX_TOKEN_BYTES} at most are supported",
            )
        special = _ids_of(kinds == CONTROL)
        bos_id = _token_id(gguf, "tokenizer.ggml.bos_token_id", size)
        split = None if spaced else SPLITS.get(metadata.require_str(_PRE, default=""))
        by_default = spaced or (split is not None and split.adds_bos and bos_id is not None)
        add_bos = _model(gguf) == SPACED_MODEL or metadata.require_bool(_ADD_BOS, default=by_default)
        if add_bos and bos_id is None:
            raise metadata.error(_ADD_BOS, "is true, but no tokenizer.ggml.bos_token_id is given")
        return cls(
            token_bytes=token_bytes,
            special=special,
            user_defined=_ids_of(kinds == USER_DEFINED),
            unused=_ids_of(kinds == UNUSED),
            eos_ids=_eos_ids(gguf, token_bytes, special),
            bos_id=bos_id,
            add_bos=add_bos,
        )


def vocab_size(gguf: ModelSource) -> int:
    """Returns the number of tokens. Raises ModelError if the vocabulary is missing or absurdly large."""
    size = len(gguf.metadata.require_strings(_TOKENS))
    if not 1 <= size <= MAX_VOCAB:
        raise gguf.metadata.error(_TOKENS, f"has {size} entries; 1 to {MAX_VOCAB} are supported")
    return size


def read_pieces(gguf: ModelSource) -> Iterator[list[str]]:
    """Yields the vocabulary's tokens as the file spells them, in the order of their ids, as lists of some thousand
    strings, so that a caller need not hold all of them in memory. Raises ModelError for a vocabulary that is missing or
    not UTF-8."""
    array = iter(gguf.metadata.require_strings(_TOKENS))
    try:
        while batch := [piece.decode("utf-8") for piece in itertools.islice(array, _BATCH)]:
            yield batch
    except UnicodeDecodeError as error:
        raise gguf.metadata.error(_TOKENS, f"holds {error.object!r}, which is not valid UTF-8") from error


def byte_alphabet() -> list[str]:
    """Returns GPT-2's table: the character that stands for each byte 0..255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [""] * 256
    for byte in printable:
        alphabet[byte] = chr(byte)
    # The others (controls, space, no-break space, soft hyphen) take the characters from U+0100 on, in order.
    for offset, byte in enumerate(byte for byte in range(256) if not alphabet[byte]):
        alphabet[byte] = chr(0x100 + offset)
    return alphabet


def _raw_bytes(pieces: Sequence[str], is_literal: np.ndarray[Any, np.dtype[np.bool_]]) -> list[bytes]:
    """Maps byte-level pieces back to bytes, all at once. Literal pieces (bool [len(pieces)]) become their UTF-8; so
    does a piece with a character outside the alphabet, as in Hugging Face's decoder."""
    values = _BYTE_OF[
        np.minimum(np.frombuffer("".join(pieces).encode("utf-32-le"), "<u4"), len(_BYTE_OF) - 1)
    ]
    ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
    raw, end_list = values.astype(np.uint8).tobytes(), ends.tolist()
    token_bytes = [raw[start:end] for start, end in zip([0, *end_list], end_list, strict=False)]
    outside = np.searchsorted(ends, np.flatnonzero(values == _OUTSIDE), side="right")
    for index in (*outside.tolist(), *np.flatnonzero(is_literal).tolist()):
        token_bytes[index] = pieces[index].encode("utf-8")
    return token_bytes


def is_spaced(gguf: ModelSource) -> bool:
    """Returns whether tokens are spelled as in SentencePiece, with SPACE for spaces and <0x0A> for bytes, and merges
    join characters.

    True for Gemma 4, whose prompts always begin with the beginning-of-sequence token, and for Llama 2 and Mistral,
    whose prompts do unless the file says otherwise.
    """
    return _model(gguf) in (SPACED_MODEL, SENTENCEPIECE_MODEL)


def has_scores(gguf: ModelSource) -> bool:
    """Returns whether tokens have scores instead of merges."""
    return _model(gguf) == SENTENCEPIECE_MODEL


def _model(gguf: ModelSource) -> str:
    return gguf.metadata.require_str("tokenizer.ggml.model")


def _corrected(gguf: ModelSource, kinds: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the kinds of tokens, int [size]. Tokens that are known by their text get their known kind."""
    kinds = np.where(kinds == UNKNOWN, CONTROL, kinds) if is_spaced(gguf) else kinds.copy()
    for token_id, kind in known_kinds(gguf.metadata.require_strings(_TOKENS), kinds.tolist()).items():
        kinds[token_id] = kind
    return kinds


def _spaced_bytes(
    gguf: ModelSource, pieces: Sequence[str], kinds: np.ndarray[Any, np.dtype[Any]]
) -> list[bytes]:
    """Returns the bytes of spaced pieces. Raises ModelError for a byte token that names no byte."""
    found = []
    for piece, kind in zip(pieces, kinds.tolist(), strict=True):
        if kind == BYTE:
            if piece not in BYTE_PIECES:
                raise gguf.metadata.error(
                    _TOKENS, f"holds {piece!r} as a byte token, but its text names no byte"
                )
            found.append(bytes([BYTE_PIECES[piece]]))
        elif kind in (CONTROL, USER_DEFINED, UNUSED):
            found.append(piece.encode("utf-8"))
        else:
            found.append(piece.replace(SPACE, " ").encode("utf-8"))
    return found


def _byte_of_character() -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Returns the inverse of the alphabet: code point to byte, _OUTSIDE for others; the last entry is for all higher
    code points."""
    table = np.full(0x145, _OUTSIDE, np.uint16)
    for byte, character in enumerate(byte_alphabet()):
        table[ord(character)] = byte
    return table


_OUTSIDE = 0xFFFF
_BYTE_OF = _byte_of_character()


def _ids_of(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> frozenset[int]:
    return frozenset(np.flatnonzero(mask).tolist())


def _token_id(gguf: ModelSource, key: str, size: int) -> int | None:
    return gguf.metadata.require_int(key, 0, size - 1) if key in gguf.metadata else None


def _eos_ids(gguf: ModelSource, token_bytes: list[bytes], special: frozenset[int]) -> tuple[int, ...]:
    """Returns the tokens that end an answer: tokens that the file names, and tokens known by their text. If a
    generation_config.json names some, they replace the known ends of a text, but not the known ends of a turn."""
    size = len(token_bytes)
    controls = {token_bytes[token_id].decode("utf-8"): token_id for token_id in special}
    known = [*turn_ends(controls)]
    if _GENERATION_ENDS in gguf.metadata:
        named: list[int | None] = [*gguf.metadata.require_ids(_GENERATION_ENDS, size)]
    else:
        named = [_token_id(gguf, key, size) for key in _END_KEYS]
        if _CONFIG_ENDS in gguf.metadata:
            named += gguf.metadata.require_ids(_CONFIG_ENDS, size)
        known += [piece for piece in TEXT_ENDS if piece in controls]
    found = [token_id for token_id in (*named, *map(controls.get, known)) if token_id is not None]
    if not found:
        raise ModelError(
            gguf.path,
            "no end-of-sequence token is named (tokenizer.ggml.eos_token_id); convert the model again",
        )
    return tuple(dict.fromkeys(found))
