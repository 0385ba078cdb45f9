"""The prefix cache's tier in RAM: pages by key, the least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.kv.host_blocks import HostBlocks, HostPage


@dataclass(slots=True)
class _Entry:
    page: HostPage
    users: int  # that read or write its blocks, which stay until then
    is_whole: bool = False


class RamStore:
    """May be used by several threads. What is reserved is there from `commit` on."""

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()  # of what follows
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first

    @property
    def max_bytes(self) -> int:
        return self._blocks.max_bytes

    def keys(self) -> list[bytes]:
        with self._lock:
            return [key for key, entry in self._entries.items() if entry.is_whole]

    def reserve(self, key: bytes, num_bytes: int) -> tuple[HostPage | None, list[bytes]]:
        """Room for a new page, and the keys of the pages that had to go for it. None: it is there already, or there is
        no room."""
        gone: list[bytes] = []
        with self._lock:
            if key in self._entries:
                return None, gone
            while (page := self._blocks.take(num_bytes)) is None:
                oldest = next((k for k, entry in self._entries.items() if not entry.users), None)
                if oldest is None:
                    return None, gone
                self._blocks.give(self._entries.pop(oldest).page)
                gone.append(oldest)
            self._entries[key] = _Entry(page, users=1)
            return page, gone

    def commit(self, key: bytes) -> None:
        """Marks a reserved page as complete: its bytes have been written."""
        with self._lock:
            entry = self._entries[key]
            entry.is_whole = True
            entry.users -= 1

    def get(self, key: bytes) -> HostPage | None:
        """A page that stays until `release`; None: it is not there."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.is_whole:
                return None
            entry.users += 1
            return entry.page

    def release(self, key: bytes) -> None:
        """Ends a use that `get` has begun."""
        with self._lock:
            self._entries[key].users -= 1

    def use(self, keys: Iterable[bytes]) -> None:
        """Makes these pages the most recently used ones, the last most; keys without a page are ignored."""
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)
