"""Remembers for which text each KV slot of the drafting model holds keys and values.

The model's own KV is never missing: the router plans every position before it is read. The drafting model computes a
text only when it drafts for it. A slot may therefore lack its KV (a page that was loaded from a tier, a prefix that was
cached while nothing was drafted, a new worker), or hold another text's KV (a rejected draft, an earlier request). A tag
tells: it is a hash of the text up to the slot's position.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.worker.sequences import Int32s

Tags = npt.NDArray[np.uint64]

_TOKEN: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)


class KvTags:
    def __init__(self, num_slots: int) -> None:
        self._tags: Tags = np.zeros(num_slots, np.uint64)  # 0: nothing was computed

    def write(self, kv_slots: Int32s, tags: Tags) -> None:
        """Notes that these slots have been computed for texts with these tags."""
        self._tags[kv_slots] = tags

    def num_valid(self, kv_slots: Int32s, tags: Tags) -> int:
        """Returns how many of the slots, from the first on, hold the KV of the text with these tags."""
        is_other = self._tags[kv_slots] != tags
        return int(is_other.argmax()) if is_other.any() else len(tags)


def first_tag(namespace: str) -> np.uint64:
    """Returns the tag of the empty text. Namespaces (`NewSeq.namespace`) have different ones, so that not even the time
    saved reveals another namespace's text."""
    return np.uint64(zlib.crc32(namespace.encode()) << 32 | 1)


def tags_of(before: np.uint64, tokens: Int32s, start: int) -> Tags:
    """Returns the tags of a text after each of its `tokens`: uint64 [n], hashes of the text up to there. tokens: int32
    [n], from position `start` on; before: the tag of the text before them."""
    positions = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint64)
    mixed = tokens.astype(np.int64).astype(np.uint64) * _TOKEN + positions * _POSITION
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MIX
    mixed ^= mixed >> np.uint64(29)
    tags: Tags = before + np.cumsum(mixed * _MIX, dtype=np.uint64)
    return tags
