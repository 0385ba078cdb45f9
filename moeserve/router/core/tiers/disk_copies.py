"""Schedules copies from the RAM tier to the disk tier: all pages written to RAM, in order, as fast as the disk
accepts them. A page that RAM evicts before its copy is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from moeserve.router.core.tiers.page_writer import PAUSE_S

MOST_WAITING = 1 << 16  # pages and states waiting; beyond that the oldest is dropped
MOST_UNDER_WAY = 16


class DiskCopies:
    def __init__(self, in_ram: Container[bytes], on_disk: Container[bytes]) -> None:
        """in_ram, on_disk: the keys that each tier holds."""
        self._in_ram = in_ram
        self._on_disk = on_disk
        self._waiting: deque[tuple[bytes, int]] = deque(maxlen=MOST_WAITING)
        self._ordered: dict[bytes, int] = {}  # key → bytes of an ordered copy
        self._paused_until = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ordered)

    def add(self, key: bytes, num_bytes: int) -> None:
        """Adds a page or state that RAM now holds."""
        if key not in self._on_disk:
            self._waiting.append((key, num_bytes))

    def orders(self, now: float) -> list[bytes]:
        """Returns the keys to copy next. now: monotonic seconds."""
        if now < self._paused_until:
            self._waiting.clear()
        keys: list[bytes] = []
        while self._waiting and len(self._ordered) < MOST_UNDER_WAY:
            key, num_bytes = self._waiting.popleft()
            if key in self._in_ram and key not in self._on_disk and key not in self._ordered:
                self._ordered[key] = num_bytes
                keys.append(key)
        return keys

    def answered(self, key: bytes) -> int:
        """Notes that the worker answered a copy order. Returns its bytes; 0 for a page that was on disk at the
        worker's start."""
        return self._ordered.pop(key, 0)

    def pause(self, now: float) -> None:
        """Pauses writing for a while, after a failed write. now: monotonic seconds."""
        self._paused_until = now + PAUSE_S
        self._waiting.clear()

    def reset(self) -> None:
        """Forgets all copies, after the worker was lost with its RAM tier."""
        self._waiting.clear()
        self._ordered.clear()
