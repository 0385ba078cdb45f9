"""Keeps the token ids of conversations' turns. An agent sends all turns with each request, and often 200 kB of tools
before them, whose tokens take 60 ms of CPU time."""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from .text_tokenizer import TextTokenizer

MAX_TOKENS: Final = 4 << 20  # kept, of 4 bytes each
ENTRY_TOKENS: Final = 80  # counted for each entry beside its own: its key and objects take some 300 bytes
MIN_CHARS: Final = 1 << 10  # of a text that is kept


class TokenCache:
    """Encodes texts as its tokenizer does, and looks up segments that it has encoded before. A segment ends with a
    token that ends a turn. Safe to call from several threads."""

    def __init__(self, tokenizer: TextTokenizer, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._ends = _ends_of_turns(tokenizer)
        self._max_tokens = max_tokens
        self._kept: OrderedDict[str, _Part] = OrderedDict()  # by tenant, least recently used first
        self._lock = threading.Lock()

    def encode_parts(self, parts: Sequence[str], tenant: str, salt: str = "") -> list[int]:
        """Returns `TextTokenizer.encode_parts(parts)`. Segments are shared between calls with the same tenant and salt
        only, because a look-up is faster than encoding, which tells whether a text was there before. A tenant has at
        most half of the cache, so that none of them drives out all others."""
        if self._ends is None:
            return self._tokenizer.encode_parts(parts)
        segments = [segment for part in parts for segment in _cut(part, self._ends)]
        keys = [_key(segment, salt) if len(segment) >= MIN_CHARS else None for segment in segments]
        with self._lock:
            part = self._part_of(tenant)
            found = [None if key is None else part.known(key) for key in keys]
        new = [segment for segment, ids in zip(segments, found, strict=True) if ids is None]
        encoded = iter(self._tokenizer.encode_batch(new) if new else [])
        ids = [next(encoded) if one is None else one.tolist() for one in found]
        with self._lock:
            for key, one, known in zip(keys, ids, found, strict=True):
                if key is not None and known is None:
                    self._part_of(tenant).keep(key, array("i", one))
            self._bound(tenant)
        return [*itertools.chain.from_iterable(ids)]

    def _part_of(self, tenant: str) -> _Part:
        part = self._kept.setdefault(tenant, _Part())
        self._kept.move_to_end(tenant)
        return part

    def _bound(self, tenant: str) -> None:
        """Drops the oldest segments of this tenant, and then those of the tenants that have waited longest."""
        self._part_of(tenant).shrink_to(self._max_tokens // 2)
        over = sum(part.tokens for part in self._kept.values()) - self._max_tokens
        for each, part in list(self._kept.items()):
            before = part.tokens
            part.shrink_to(before - max(over, 0))
            over -= before - part.tokens
            if not part.tokens:
                del self._kept[each]


class _Part:
    """A tenant's segments."""

    def __init__(self) -> None:
        self.tokens = 0  # with ENTRY_TOKENS for each
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()  # least recently used first

    def known(self, key: bytes) -> array[int] | None:
        if (ids := self._ids.get(key)) is not None:
            self._ids.move_to_end(key)
        return ids

    def keep(self, key: bytes, ids: array[int]) -> None:
        if key not in self._ids:
            self._ids[key] = ids
            self.tokens += ENTRY_TOKENS + len(ids)

    def shrink_to(self, tokens: int) -> None:
        """Drops segments until at most this many tokens are kept; all of them for a negative number."""
        while self._ids and self.tokens > tokens:
            _, ids = self._ids.popitem(last=False)
            self.tokens -= ENTRY_TOKENS + len(ids)


def _ends_of_turns(tokenizer: TextTokenizer) -> re.Pattern[str] | None:
    """Returns an expression for the tokens that end a turn and after which a text may be cut: no other token that is
    matched whole has them within, or reaches into them from before. None if there are none, or if a text's tokens
    depend on where it begins."""
    vocabulary = tokenizer.vocabulary
    if tokenizer.spaces_beginnings:
        return None
    whole = {tokenizer.token_text(i) for i in vocabulary.special | vocabulary.user_defined}
    ends = {tokenizer.token_text(i) for i in vocabulary.eos_ids if i in vocabulary.special}
    apart = [end for end in ends if end and not any(_reaches(other, end) for other in whole - {end})]
    return re.compile(f"({'|'.join(map(re.escape, apart))})") if apart else None


def _reaches(other: str, end: str) -> bool:
    """Returns whether a match of `other` can take the place of a part of `end`: it is longer, or begins before."""
    sizes = range(1, min(len(end), len(other)))
    return end in other or any(other.endswith(end[:size]) for size in sizes)


def _cut(text: str, ends: re.Pattern[str]) -> list[str]:
    pieces = ends.split(text)  # text, end, text, ..., text
    return [
        text + end
        for text, end in itertools.zip_longest(pieces[::2], pieces[1::2], fillvalue="")
        if text or end
    ]


def _key(segment: str, salt: str) -> bytes:
    # Errors pass the halves of surrogate pairs, which the tokenizer refuses.
    salted = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return hashlib.blake2b(segment.encode("utf-8", "surrogatepass"), key=salted, digest_size=32).digest()
