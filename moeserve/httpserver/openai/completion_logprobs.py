"""Log-probabilities in the form of /v1/completions.

A complete answer or an echoed prompt may have a million entries: they are encoded as JSON in pieces, on a thread, so
that streams continue. All choices of a prompt share its entries: `EchoedLogprobs` encodes them once."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import cast

import orjson

from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.logprobs import TOKENS_AT_ONCE, finite
from moeserve.httpserver.openai.objects import CompletionLogprobs
from moeserve.messages.sampling import TokenLogprob


class TextOffsets:
    """Computes the offset of each token in the returned text, in characters. A token that begins within a character
    gets the offset of that character. A token that is not part of the text gets the offset of the next token."""

    def __init__(
        self, text: ModelText, *, start: int = 0, skips_special: bool, hides_first: bool = False
    ) -> None:
        """start: the first token's offset. hides_first: the first token is not part of the text."""
        self._text = text
        self._next = start
        self._skips_special = skips_special
        self._hides_next = hides_first
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_id: int) -> int:
        """Returns the offset of the next token."""
        is_hidden = self._hides_next or (self._skips_special and self._text.is_special(token_id))
        self._hides_next = False
        text = b"" if is_hidden else self._text.token_bytes(token_id)
        if not text:
            return self._next
        self._next += len(self._utf8.decode(text[:1]))  # with U+FFFD if it cuts off an incomplete character
        is_open = self._utf8.getstate()[0] != b""
        place = self._next if is_open else self._next - 1
        self._next += len(self._utf8.decode(text[1:]))
        return place


class CompletionLogprobsWriter:
    """Makes the parallel lists of a prompt or of one choice. `text_offset` continues from chunk to chunk.

    `top_logprobs` are dicts keyed by the token's text, so of two tokens with the same text only the likelier one is
    kept. With `as_ids` the keys are "token_id:123", which are unique.
    """

    def __init__(self, text: ModelText, top: int, as_ids: bool, offsets: TextOffsets) -> None:
        self._text = text
        self._top = top
        self._as_ids = as_ids
        self._offsets = offsets

    def first_prompt_token(self, token_id: int) -> CompletionLogprobs:
        """Returns the entry of a prompt's first token, which has no log-probability."""
        return self._advance([token_id], [None], [None])

    def write(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return self._advance(
            [token.token_id for token in tokens],
            [finite(token.logprob) for token in tokens],
            [self._top_of(token) for token in tokens],
        )

    def _advance(
        self, ids: list[int], logprobs: list[float | None], tops: list[dict[str, float] | None]
    ) -> CompletionLogprobs:
        return {
            "tokens": [self._name(token_id) for token_id in ids],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": [self._offsets.take(token_id) for token_id in ids],
        }

    def _top_of(self, token: TokenLogprob) -> dict[str, float]:
        """Returns the most likely tokens, and the chosen one if it is not among them."""
        top: dict[str, float] = {}
        ranked = [*zip(token.top_ids[: self._top], token.top_logprobs, strict=False)]
        for token_id, logprob in [*ranked, (token.token_id, token.logprob)]:
            top.setdefault(self._name(token_id), finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text.token_text(token_id)


class EchoedLogprobs:
    """The log-probabilities of one prompt, as JSON. Each list of a choice consists of the prompt's entries and then the
    answer's."""

    def __init__(
        self, writer: CompletionLogprobsWriter, first_id: int, tokens: Sequence[TokenLogprob]
    ) -> None:
        """writer: a new writer. first_id: the prompt's first token. tokens: the prompt's other tokens."""
        first = _encoded(writer.first_prompt_token(first_id))
        self._lists = _joined([first, *_pieces(writer, tokens)])

    def followed_by(
        self, writer: CompletionLogprobsWriter, tokens: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """Returns all entries of a choice, for a response: the values are encoded JSON."""
        return _object([self._lists, *_pieces(writer, tokens)])


def encoded_logprobs(writer: CompletionLogprobsWriter, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
    """Returns the log-probabilities of one choice without its prompt, for a response: the values are encoded JSON."""
    return _object([*_pieces(writer, tokens)])


# The lists of a `CompletionLogprobs`, or pieces of them, as JSON without brackets.
_Lists = dict[str, bytes]


def _pieces(writer: CompletionLogprobsWriter, tokens: Sequence[TokenLogprob]) -> Iterator[_Lists]:
    """Yields the encoded lists in pieces: encoding holds the GIL, and other threads run between two pieces."""
    for first in range(0, len(tokens), TOKENS_AT_ONCE):
        yield _encoded(writer.write(tokens[first : first + TOKENS_AT_ONCE]))


def _encoded(written: CompletionLogprobs) -> _Lists:
    return {name: orjson.dumps(entries)[1:-1] for name, entries in written.items()}


def _joined(pieces: Sequence[_Lists]) -> _Lists:
    names = CompletionLogprobs.__annotations__
    return {name: b",".join(filter(None, (piece[name] for piece in pieces))) for name in names}


def _object(pieces: Sequence[_Lists]) -> CompletionLogprobs:
    lists = [b'"%s":[%s]' % (name.encode(), entries) for name, entries in _joined(pieces).items()]
    return cast("CompletionLogprobs", orjson.Fragment(b"{" + b",".join(lists) + b"}"))


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Joins the pieces of one choice."""
    whole: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        whole["tokens"] += part["tokens"]
        whole["token_logprobs"] += part["token_logprobs"]
        whole["top_logprobs"] += part["top_logprobs"]
        whole["text_offset"] += part["text_offset"]
    return whole
