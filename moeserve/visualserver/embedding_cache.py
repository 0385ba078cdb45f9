"""The embeddings of pictures that may come again: conversations send theirs with every turn."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Embeddings:
    rows: int  # tokens; of a picture in tiles see `PictureEncoded.more`
    columns: int
    data: bytes  # float32 [rows * columns, hidden]
    sha256: bytes  # of the first tile's part of `data`
    tiles: int = 1  # which have equal parts of `data`

    @property
    def parts(self) -> list[memoryview]:
        """The tiles' embeddings."""
        size = len(self.data) // self.tiles
        return [memoryview(self.data)[start : start + size] for start in range(0, len(self.data), size)]


class EmbeddingCache:
    """The embeddings that were used last, up to `budget` bytes. One writer: the encoding thread."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._entries: OrderedDict[bytes, Embeddings] = OrderedDict()

    def get(self, key: bytes) -> Embeddings | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, embeddings: Embeddings) -> None:
        """A key that is not there. What is larger than the budget is not kept."""
        self._entries[key] = embeddings
        self._used += len(embeddings.data)
        while self._used > self._budget:
            _, dropped = self._entries.popitem(last=False)
            self._used -= len(dropped.data)
