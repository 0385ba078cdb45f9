"""Recent texts (prompts and answers) of all requests, in which drafts are looked up: for repeated questions and
quoted documents.

Texts are stored in segments of a ring buffer of tokens. A hash table maps each run of `match` tokens to its latest
place; hits are verified. Requests of different namespaces (`NewSeq.namespace`) never use each other's texts, so not
even the time saved reveals them.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.worker.drafts.drafter import NO_DRAFT
from moeserve.worker.sequences import Int32s

TOKENS: Final = 1 << 20  # tokens of all texts; 24 MiB with the table, allocated as it fills
TABLE: Final = 4  # table entries per token; of two runs with the same entry the later one is kept
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)


def hashes_of(tokens: Int32s, width: int) -> npt.NDArray[np.uint64]:
    """Returns a uint64 hash of each `width` consecutive tokens: [len(tokens) - width + 1]. tokens: int32, at least
    `width`."""
    ids = tokens.astype(np.uint64) + np.uint64(1)
    count = len(ids) - width + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(width):
        hashes = (hashes ^ ids[offset : offset + count]) * _FACTOR
        hashes ^= hashes >> np.uint64(29)
    return hashes


class SharedTexts:
    def __init__(self, match: int, capacity: int = TOKENS) -> None:
        """match: tokens that must be equal. capacity: in tokens, a power of two."""
        self.match = match
        self._tokens: Int32s = np.zeros(capacity, np.int32)
        self._segment: Int32s = np.zeros(capacity, np.int32)  # segment of each place; 0: none
        self._places: Int32s = np.zeros(TABLE * capacity, np.int32)  # hash → place
        self._namespaces: dict[int, str] = {}  # segment → namespace
        self._end = 0
        self._num_segments = 1

    def add(self, namespace: str, tokens: Int32s) -> None:
        """Adds a text, or its new end together with the `match` tokens before."""
        tokens = tokens[-len(self._tokens) :]
        if len(tokens) <= self.match:
            return
        if self._end + len(tokens) > len(self._tokens):
            self._end = 0
        first, self._end = self._end, self._end + len(tokens)
        for gone in np.unique(self._segment[first : self._end]).tolist():
            self._namespaces.pop(gone, None)  # the rest of the overwritten segment is no longer found
        self._tokens[first : self._end] = tokens
        self._segment[first : self._end] = self._num_segments
        self._namespaces[self._num_segments] = namespace
        self._num_segments += 1
        places = np.arange(first + self.match - 1, self._end, dtype=np.int32)
        self._places[self._index(namespace, tokens)] = places

    def following(self, namespace: str, last: Int32s, most: int) -> Int32s:
        """Returns up to `most` tokens that followed the latest occurrence of `last`, the final `match` tokens of a
        text."""
        place = int(self._places[self._index(namespace, last)[0]])
        if self._namespaces.get(int(self._segment[place])) != namespace:
            return NO_DRAFT
        before = slice(max(place - self.match + 1, 0), place + 1)
        same = self._segment[place]
        if (self._segment[before] != same).any() or not np.array_equal(self._tokens[before], last):
            return NO_DRAFT
        found = slice(place + 1, place + 1 + most)
        draft: Int32s = self._tokens[found][self._segment[found] == same].copy()
        return draft

    def _index(self, namespace: str, tokens: Int32s) -> npt.NDArray[np.uint64]:
        """Returns the table entries of each run of `match` tokens."""
        salt = np.uint64(zlib.crc32(namespace.encode()))
        mixed = (hashes_of(tokens, self.match) ^ salt) * _FACTOR
        index: npt.NDArray[np.uint64] = (mixed >> np.uint64(32)) % np.uint64(len(self._places))
        return index
