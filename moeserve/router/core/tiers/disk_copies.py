"""What is copied from the tier in RAM to that on disk: all that is written to RAM, in this order, as fast as the disk
takes it. What RAM gives up before its turn comes is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from moeserve.router.core.tiers.page_writer import PAUSE_S

MOST_WAITING = 1 << 16  # pages and states; beyond it the oldest is dropped
MOST_UNDER_WAY = 16


class DiskCopies:
    def __init__(self, in_ram: Container[bytes], on_disk: Container[bytes]) -> None:
        """The keys that each tier has."""
        self._in_ram = in_ram
        self._on_disk = on_disk
        self._waiting: deque[tuple[bytes, int]] = deque(maxlen=MOST_WAITING)
        self._ordered: dict[bytes, int] = {}  # bytes of each
        self._paused_until = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ordered)

    def add(self, key: bytes, num_bytes: int) -> None:
        """A page or a state that RAM has now."""
        if key not in self._on_disk:
            self._waiting.append((key, num_bytes))

    def orders(self, now: float) -> list[bytes]:
        """The keys of what is copied next."""
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
        """The worker has copied it, or not: its bytes. 0 for what was on disk at the worker's start."""
        return self._ordered.pop(key, 0)

    def pause(self, now: float) -> None:
        """A write has failed: there are none for a while."""
        self._paused_until = now + PAUSE_S
        self._waiting.clear()

    def reset(self) -> None:
        """The worker is lost, and what its RAM had."""
        self._waiting.clear()
        self._ordered.clear()
