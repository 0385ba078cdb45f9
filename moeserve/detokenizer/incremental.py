"""Tokens of one request to text, as they come, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence


class TokenDecoder:
    """Joins the bytes of a request's tokens and decodes them as UTF-8.

    A token may end inside a character (byte-level vocabularies split emoji and CJK): the open bytes wait for
    the next token. Invalid bytes become U+FFFD. The texts of all `push` calls and of `flush`, joined, are
    what `bytes.decode("utf-8", "replace")` makes of all the bytes at once.

    `token_bytes` is the vocabulary by token id; `skipped` are the ids that give no text.
    """

    def __init__(self, token_bytes: Sequence[bytes], skipped: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """No token follows: what an unfinished character leaves (U+FFFD), or nothing."""
        return self._utf8.decode(b"", final=True)
