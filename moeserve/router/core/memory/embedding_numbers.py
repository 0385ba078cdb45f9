"""Assigns a number to each span of embeddings; in sequences of token ids the number stands for the span.

All positions of a span carry the same negative number instead of a token id. The number identifies the span's
content: equal content has the same number while anything refers to it, and a number is never reused. So the prefix
tree compares spans exactly, as integers; a path can enter a span only at its first position. Pages in tiers and KV
events outlive this process, so their keys contain the span's content hash instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moeserve.messages.prompt_embeddings import EmbeddingSpan

FIRST_NUMBER = -2  # -1 already means "none" in token fields
LAST_NUMBER = -(1 << 31)  # smallest int32; at a hundred new spans per second the range lasts eight months
MOST_IDLE = 1 << 14  # spans without an open request that are kept before unreferenced ones are dropped


@dataclass(slots=True)
class _Entry:
    key: bytes  # EmbeddingSpan.key
    number: int
    placeholder: int  # the placeholder token's id in the first prompt with this span
    holders: int = 0  # open requests with this span


class EmbeddingNumbers:
    def __init__(self, cached: Callable[[], Iterable[bytes | bytearray]]) -> None:
        """cached: a function that returns all tokens (int32) that a cache may still look up."""
        self._cached = cached
        self._by_key: dict[bytes, _Entry] = {}
        self._by_number: dict[int, _Entry] = {}
        self._next = FIRST_NUMBER
        self._most = MOST_IDLE

    def __len__(self) -> int:
        return len(self._by_number)

    def name(self, tokens: array[int], spans: Sequence[EmbeddingSpan]) -> None:
        """Replaces a request's tokens at its spans by their numbers, which stay valid until `leave`. Raises
        OverflowError if no number is left; the router must then be restarted."""
        for span in spans:
            entry = self._entry(span.key, tokens[span.start])
            entry.holders += 1
            tokens[span.start : span.end] = array("i", [entry.number]) * span.count

    def leave(self, tokens: array[int], spans: Sequence[EmbeddingSpan]) -> None:
        """Notes that the request with these tokens has ended. The numbers of its cached spans remain known."""
        for span in spans:
            self._by_number[tokens[span.start]].holders -= 1

    def content(self, tokens: bytes | bytearray) -> bytes:
        """Returns a process-independent encoding of tokens: the tokens, with -1 at all positions of spans, followed
        by the spans' keys. It is unambiguous after a given prefix, because a key implies its span's length."""
        keys = self.keys_in(tokens)
        if not keys:
            return bytes(tokens)
        ids = array("i", [max(one, -1) for one in memoryview(tokens).cast("i")])
        return ids.tobytes() + b"".join(keys)

    def shown(self, tokens: bytes | bytearray) -> list[int]:
        """Returns token ids for people and gateways, with placeholder ids at spans."""
        ids = memoryview(tokens).cast("i").tolist()
        if not self._by_number or min(ids, default=0) >= 0:
            return ids
        return [one if one >= 0 else self._by_number[one].placeholder for one in ids]

    def keys_in(self, tokens: bytes | bytearray) -> list[bytes]:
        """Returns the keys of the spans at these positions, in order."""
        if not self._by_number:
            return []
        return [self._by_number[one].key for one in _numbers(tokens)]

    def _entry(self, key: bytes, placeholder: int) -> _Entry:
        entry = self._by_key.get(key)
        if entry is None:
            if len(self._by_number) >= self._most:
                self._forget()
            if self._next < LAST_NUMBER:
                raise OverflowError("no number is left for another span of embeddings")
            entry = self._by_key[key] = self._by_number[self._next] = _Entry(key, self._next, placeholder)
            self._next -= 1
        return entry

    def _forget(self) -> None:
        """Drops the numbers of spans that no request and no cache refers to. O(cached tokens)."""
        known = {number for tokens in self._cached() for number in _numbers(tokens)}
        for entry in list(self._by_number.values()):
            if not entry.holders and entry.number not in known:
                del self._by_number[entry.number], self._by_key[entry.key]
        self._most = MOST_IDLE + 2 * len(self._by_number)


def _numbers(tokens: bytes | bytearray) -> Iterator[int]:
    """Yields the negative numbers in int32 data, without consecutive repeats."""
    ids = memoryview(tokens).cast("i")
    if min(ids, default=0) >= 0:
        return
    last = 0
    for one in ids:
        if one < 0 and one != last:
            yield one
        last = one
