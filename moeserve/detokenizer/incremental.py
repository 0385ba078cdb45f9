"""Incremental detokenization of one request: tokens to text that never splits a character."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence


class TokenDecoder:
    """Concatenates the bytes of a request's tokens and decodes them as UTF-8.

    A token may end inside a character, since byte-level vocabularies split emoji and CJK. The bytes of an unfinished
    character wait for the next token. Invalid bytes become U+FFFD. The texts of all `push` calls and of `flush`,
    concatenated, equal `bytes.decode("utf-8", "replace")` of all the bytes.

    `token_bytes` is the vocabulary by token id; the ids in `skipped` have no text.
    """

    def __init__(self, token_bytes: Sequence[bytes], skipped: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; may be empty. Raises IndexError for an id beyond the
        vocabulary."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """Ends the text: returns U+FFFD for an unfinished character, else the empty string."""
        return self._utf8.decode(b"", final=True)
