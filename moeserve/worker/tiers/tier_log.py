"""Collects the news of one tier between two reports to the router. The caller holds the lock."""

from __future__ import annotations

import time

from moeserve.messages.pages import TierNews


class TierLog:
    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.gone: list[bytes] = []
        self.refused: list[bytes] = []
        self.skipped: list[bytes] = []
        self.loaded: list[bytes] = []
        self._lists = (self.stored, self.gone, self.refused, self.skipped, self.loaded)
        self._loading = 0  # pages being loaded
        self._loading_since = 0.0
        self._load_s = 0.0

    @property
    def has_news(self) -> bool:
        return any(self._lists)

    def loads_begin(self, count: int = 1) -> None:
        if not self._loading:
            self._loading_since = time.perf_counter()
        self._loading += count

    def loads_end(self, count: int = 1) -> None:
        self._loading -= count
        if not self._loading:
            self._load_s += time.perf_counter() - self._loading_since

    def take(self) -> TierNews:
        """Returns the news since the last call. Loads in progress count with their time so far."""
        if self._loading:
            now = time.perf_counter()
            self._load_s += now - self._loading_since
            self._loading_since = now
        news = TierNews(
            stored=b"".join(self.stored),
            gone=b"".join(self.gone),
            refused=b"".join(self.refused),
            skipped=b"".join(self.skipped),
            loaded=b"".join(self.loaded),
            load_ms=self._load_s * 1e3,
        )
        for keys in self._lists:
            keys.clear()
        self._load_s = 0.0
        return news
