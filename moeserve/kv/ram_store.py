"""The prefix cache's RAM tier: pages by key; the least recently used are evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.kv.host_blocks import HostBlocks, HostPage


@dataclass(slots=True)
class _Entry:
    page: HostPage
    users: int  # reads and writes in progress; the blocks stay until they end
    is_whole: bool = False


class RamStore:
    """A thread-safe store of pages. A reserved page becomes readable with `commit`."""

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()  # guards the attributes below
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    @property
    def max_bytes(self) -> int:
        return self._blocks.max_bytes

    def keys(self) -> list[bytes]:
        with self._lock:
            return [key for key, entry in self._entries.items() if entry.is_whole]

    def reserve(self, key: bytes, num_bytes: int) -> tuple[HostPage | None, list[bytes]]:
        """Reserves memory for a new page. Returns it and the keys of the pages evicted for it; None instead of the
        page if the key is stored already or the memory is in use."""
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
        """Returns the page of `key`, which stays in memory until `release`; None if it is not stored."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.is_whole:
                return None
            entry.users += 1
            return entry.page

    def release(self, key: bytes) -> None:
        """Ends one use begun by `get`."""
        with self._lock:
            self._entries[key].users -= 1

    def use(self, keys: Iterable[bytes]) -> None:
        """Marks these pages as most recently used, the last one most. Keys without a page are ignored."""
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)
