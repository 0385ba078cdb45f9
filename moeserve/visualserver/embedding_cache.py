"""Keeps the embeddings of pictures that may come again: a conversation sends its pictures with every turn."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Embeddings:
    rows: int  # tokens; for a picture in tiles, see `PictureEncoded.more`
    columns: int
    data: bytes  # float32 [rows * columns, hidden]
    sha256: bytes  # of the first tile's part of `data`
    tiles: int = 1  # tiles of the picture, or twos of a video's frames, which have equal parts of `data`
    times: tuple[float, ...] = ()  # see `PictureEncoded`

    @property
    def parts(self) -> list[memoryview]:
        """Returns the embeddings of each tile or two frames."""
        size = len(self.data) // self.tiles
        return [memoryview(self.data)[start : start + size] for start in range(0, len(self.data), size)]


class EmbeddingCache:
    """The embeddings that were used last, up to `budget` bytes. Only the encoding thread uses the cache."""

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
        """Adds embeddings under a key that is not in the cache. Embeddings larger than the budget are not kept."""
        self._entries[key] = embeddings
        self._used += len(embeddings.data)
        while self._used > self._budget:
            _, dropped = self._entries.popitem(last=False)
            self._used -= len(dropped.data)
