"""Text to token ids and back, with a `tokenizers.Tokenizer` built straight from the model's arrays.

It does what Hugging Face's tokenizers of the supported families do: NFC normalisation or none, a split expression,
byte-level BPE; or, of Gemma, Llama 2 and Mistral, BPE over characters, with another character in place of spaces.
Going through the arrays takes a fraction of a second; transformers' own GGUF reading takes ten.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from moeserve.models.sources.source import ModelSource
from moeserve.models.sources.splits import QWEN2, SPLITS, Split

from .sentencepiece import merges_of_scores
from .vocabulary import (
    MAX_VOCAB,
    SENTENCEPIECE_MODEL,
    SPACE,
    SPACED_MODEL,
    Vocabulary,
    has_scores,
    is_spaced,
    read_pieces,
)

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_MERGES = "tokenizer.ggml.merges"
_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
# Keys that GGUF files do not have: they carry settings of a Hugging Face folder.
_NORMALIZER = "tokenizer.normalizer"
_IGNORE_MERGES = "tokenizer.ignore_merges"

# Most tokens that are matched whole. Adding 100,000 to the tokenizers library takes 57 s, a million takes minutes.
MAX_WHOLE = 1 << 12
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}


class TextTokenizer:
    """Encodes and decodes text. Safe to call from several threads, because the tokenizers never change once built."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        with_special: Tokenizer,
        without_special: Tokenizer,
        *,
        spaced: bool,
        going_on: Tokenizer | None = None,
    ) -> None:
        """`spaced`: a token's text is the text itself, but for spaces. `going_on`: for text that continues a text, if
        the other two tokenizers put a space before a text: the same without that space."""
        self.vocabulary = vocabulary
        self._spaced = spaced
        self._with_special = with_special
        self._without_special = without_special
        self._going_on = going_on
        # Bytes that no token spells, and the character that replaces characters with such bytes; "" if it cannot be
        # spelled either.
        self.missing_bytes = _UTF8_BYTES - {piece[0] for piece in vocabulary.token_bytes if len(piece) == 1}
        self._replacement = next((one for one in "\ufffd?" if not self.missing_bytes & {*one.encode()}), "")

    @classmethod
    def from_gguf(cls, gguf: ModelSource) -> TextTokenizer:
        """Builds the tokenizer of a model. Raises ModelError, also for an unsupported kind of tokenizer."""
        split = None if is_spaced(gguf) else _split_of(gguf)
        vocabulary = Vocabulary.from_gguf(gguf)
        _check_whole(gguf, len(vocabulary.special) + len(vocabulary.user_defined))
        pieces = [piece for batch in read_pieces(gguf) for piece in batch]
        scored = has_scores(gguf)
        model = BPE(
            _piece_ids(gguf, pieces),
            merges_of_scores(gguf, pieces, vocabulary) if scored else list(_merges(gguf, pieces)),
            # A word that is a token stays one token, even if no merges lead to it.
            ignore_merges=gguf.metadata.require_bool(
                _IGNORE_MERGES, default=split is not None and split.ignores_merges
            ),
            byte_fallback=split is None,
        )
        # Two tokenizers of one model, because the set of tokens that are matched whole is fixed per tokenizer.
        user_defined = [_added(pieces[i], special=False) for i in sorted(vocabulary.user_defined)]
        special = [_added(pieces[i], special=True) for i in sorted(vocabulary.special)]
        kinds = (user_defined + special, user_defined)
        if split is None:
            prefix = scored and gguf.metadata.require_bool(_SPACE_PREFIX, default=True)
            with_special, without = (_spaced_tokenizer(model, added, prefix=prefix) for added in kinds)
            going_on = _spaced_tokenizer(model, user_defined, prefix=False) if prefix else None
            return cls(vocabulary, with_special, without, spaced=True, going_on=going_on)
        nfc = gguf.metadata.require_str(_NORMALIZER, default="NFC" if split.nfc else "none") == "NFC"
        with_special, without = (_tokenizer(model, added, split, nfc=nfc) for added in kinds)
        return cls(vocabulary, with_special, without, spaced=False)

    @property
    def spaces_beginnings(self) -> bool:
        """True if a space is put before a text, and so before a text that continues another."""
        return self._going_on is not None

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Returns the token ids of `text`. Control tokens spelled in the text become these tokens only with
        `parse_special`.

        Adds no beginning-of-sequence token; `vocabulary.add_bos` says whether the model wants one. The text
        is brought into Unicode's form NFC first where the model's tokenizer does. ValueError for lone surrogates, which
        no UTF-8 can hold.
        """
        return self._choose(parse_special).encode(self._spelled(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], parse_special: bool = True) -> list[list[int]]:
        """Returns the token ids of each text, as `encode` would; uses several cores."""
        batch = self._choose(parse_special).encode_batch_fast(
            [self._spelled(text) for text in texts], add_special_tokens=False
        )
        return [encoding.ids for encoding in batch]

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Returns the token ids of one text that is given in parts. No token, and no control token's text, crosses the
        border between two parts. Uses several cores."""
        if self._going_on is None or len(parts) < 2:
            return [*itertools.chain(*self.encode_batch(parts))]
        return [*self.encode(parts[0]), *itertools.chain(*map(self.encode_rest, parts[1:]))]

    def encode_rest(self, text: str, parse_special: bool = True) -> list[int]:
        """Returns the token ids of a text that continues another one: without the space that some vocabularies put
        before a text. Holds the GIL only for short moments."""
        if self._going_on is None:
            (ids,) = self.encode_batch([text], parse_special)
            return ids
        whole = self.vocabulary.user_defined
        if parse_special:
            whole |= self.vocabulary.special
        starts = [at for i in whole if (at := text.find(self.token_text(i))) >= 0]
        begun = min(starts, default=len(text))
        (first,) = self._going_on.encode_batch_fast([self._spelled(text[:begun])], add_special_tokens=False)
        (rest,) = self.encode_batch([text[begun:]], parse_special)
        return [*first.ids, *rest]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text. Raises IndexError outside 0..size-1."""
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self.vocabulary.token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Returns the text of the single token, with U+FFFD where its bytes are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Returns the text of `ids`, with U+FFFD for invalid UTF-8, without the space that `encode` puts before a text.
        Raises IndexError outside 0..size-1."""
        special = self.vocabulary.special
        kept = (self.token_bytes(i) for i in ids if not (skip_special and i in special))
        text = b"".join(kept).decode("utf-8", errors="replace")
        return text if self._going_on is None else text.removeprefix(" ")

    def _spelled(self, text: str) -> str:
        """Returns the text with characters replaced that contain a byte without a token; such a byte would otherwise
        vanish."""
        text = _valid(text)
        if not self.missing_bytes:
            return text
        lost = [char for char in set(text) if self.missing_bytes & {*char.encode()}]
        if self._spaced:
            lost = [char for char in lost if self._without_special.token_to_id(char) is None]
        return text.translate({ord(char): self._replacement for char in lost}) if lost else text

    def _choose(self, parse_special: bool) -> Tokenizer:
        return self._with_special if parse_special else self._without_special


def _split_of(gguf: ModelSource) -> Split:
    metadata = gguf.metadata
    model = metadata.require_str(_MODEL)
    if model != "gpt2":
        raise metadata.error(
            _MODEL,
            f"is {model!r}, which is not supported; supported are 'gpt2' (byte-level BPE), "
            f"{SENTENCEPIECE_MODEL!r} (SentencePiece's BPE) and {SPACED_MODEL!r}",
        )
    pre = metadata.require_str(_PRE)
    if pre not in SPLITS:
        raise metadata.error(_PRE, f"is {pre!r}, which is not supported; supported are {', '.join(SPLITS)}")
    return SPLITS[pre]


def _check_whole(gguf: ModelSource, count: int) -> None:
    if count > MAX_WHOLE:
        raise gguf.metadata.error(
            "tokenizer.ggml.token_type",
            f"makes {count} tokens control or user-defined ones; {MAX_WHOLE} at most are supported",
        )


def _piece_ids(gguf: ModelSource, pieces: list[str]) -> dict[str, int]:
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        repeated = next(piece for token_id, piece in enumerate(pieces) if ids[piece] != token_id)
        raise gguf.metadata.error(
            "tokenizer.ggml.tokens", f"holds {repeated!r} twice; convert the model again"
        )
    return ids


def _merges(gguf: ModelSource, pieces: list[str]) -> Iterator[tuple[str, str]]:
    known = set(pieces)
    merges = gguf.metadata.require_strings(_MERGES)
    if len(merges) > MAX_VOCAB:
        raise gguf.metadata.error(_MERGES, f"has {len(merges)} entries; {MAX_VOCAB} at most are supported")
    for merge in merges:
        left, _, right = merge.decode("utf-8", errors="replace").partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise gguf.metadata.error(
                _MERGES, f"holds {merge!r}, whose parts or whole are not in the vocabulary"
            )
        yield left, right


def _added(piece: str, special: bool) -> AddedToken:
    return AddedToken(piece, special=special, normalized=False)


def _tokenizer(model: BPE, added: list[AddedToken], split: Split, *, nfc: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(split)
    tokenizer.add_tokens(added)
    return tokenizer


def _spaced_tokenizer(model: BPE, added: list[AddedToken], *, prefix: bool) -> Tokenizer:
    """Merges join characters of the whole text between line ends; a character without a token is its bytes'. prefix:
    what follows a token that is matched whole, or nothing, begins with one more space."""
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    tokenizer.add_tokens(added)
    return tokenizer


def pre_tokenizer(split: Split = QWEN2) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer, which splits text into words and maps them to the byte alphabet."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(e), behavior="isolated") for e in split.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _valid(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds a lone surrogate at character {error.start}: it is not valid Unicode; remove it"
        ) from error
    return text
