"""Numbers that stand for spans of embeddings where tokens are expected.

All positions of a span have one negative number in place of a token. It stands for the span's content: the same content
has the same number while anything refers to it, and no number is ever given to another content. So the prefix tree
tells spans apart exactly, by comparing integers: a path enters a span at its first position and nowhere else. Pages in
tiers and KV events, which outlive this process or leave it, are keyed by the content itself."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moeserve.messages.prompt_embeddings import EmbeddingSpan

FIRST_NUMBER = -2  # -1 means "none" in places that have tokens
LAST_NUMBER = -(1 << 31)  # the least int32: a hundred new spans a second last for eight months
MOST_IDLE = 1 << 14  # spans without a request, before those that no cache refers to are forgotten


@dataclass(slots=True)
class _Entry:
    key: bytes  # EmbeddingSpan.key
    number: int
    placeholder: int  # the placeholder's id in the first prompt that has the span
    holders: int = 0  # open requests that have it


class EmbeddingNumbers:
    def __init__(self, cached: Callable[[], Iterable[bytes | bytearray]]) -> None:
        """cached: all tokens, int32, that a cache may still ask about."""
        self._cached = cached
        self._by_key: dict[bytes, _Entry] = {}
        self._by_number: dict[int, _Entry] = {}
        self._next = FIRST_NUMBER
        self._most = MOST_IDLE

    def __len__(self) -> int:
        return len(self._by_number)

    def name(self, tokens: array[int], spans: Sequence[EmbeddingSpan]) -> None:
        """Writes each span's number to its positions of a request's tokens, until `leave`. Raises OverflowError when
        none is left: then the router is started anew."""
        for span in spans:
            entry = self._entry(span.key, tokens[span.start])
            entry.holders += 1
            tokens[span.start : span.end] = array("i", [entry.number]) * span.count

    def leave(self, tokens: array[int], spans: Sequence[EmbeddingSpan]) -> None:
        """The request with these tokens has ended. The numbers of its cached spans stay known."""
        for span in spans:
            self._by_number[tokens[span.start]].holders -= 1

    def content(self, tokens: bytes | bytearray) -> bytes:
        """Returns what stands for these tokens outside this process: the tokens, with -1 at all positions of spans, and
        then the spans' keys. It is unambiguous behind what is before it, because a key implies its span's length."""
        keys = self.keys_in(tokens)
        if not keys:
            return bytes(tokens)
        ids = array("i", [max(one, -1) for one in memoryview(tokens).cast("i")])
        return ids.tobytes() + b"".join(keys)

    def shown(self, tokens: bytes | bytearray) -> list[int]:
        """The ids for people and gateways, with placeholders where spans are."""
        ids = memoryview(tokens).cast("i").tolist()
        if not self._by_number or min(ids, default=0) >= 0:
            return ids
        return [one if one >= 0 else self._by_number[one].placeholder for one in ids]

    def keys_in(self, tokens: bytes | bytearray) -> list[bytes]:
        """The keys of the spans that have some of these positions, in order."""
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
        """Drops the numbers of spans that neither a request nor a cache refers to. O(cached tokens)."""
        known = {number for tokens in self._cached() for number in _numbers(tokens)}
        for entry in list(self._by_number.values()):
            if not entry.holders and entry.number not in known:
                del self._by_number[entry.number], self._by_key[entry.key]
        self._most = MOST_IDLE + 2 * len(self._by_number)


def _numbers(tokens: bytes | bytearray) -> Iterator[int]:
    """The negative numbers among int32s, without repeats that follow one another."""
    ids = memoryview(tokens).cast("i")
    if min(ids, default=0) >= 0:
        return
    last = 0
    for one in ids:
        if one < 0 and one != last:
            yield one
        last = one
