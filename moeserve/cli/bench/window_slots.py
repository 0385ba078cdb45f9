"""Slots of the sliding-window layers' KV pool, for benchmarks that drive a worker themselves."""

from __future__ import annotations

from collections import deque

import numpy as np

from moeserve.messages.steps import WorkerReady


class WindowSlots:
    """Assigns window slots as a router does. Slots that no later row of a sequence reads are free for the next plan."""

    def __init__(self, ready: WorkerReady) -> None:
        self._window = ready.window
        self._free: deque[int] = deque(range(ready.num_window_slots))
        self._held: dict[int, deque[tuple[int, int]]] = {}  # by sequence: (position, slot) pairs, ascending

    def take(self, seq: int, start: int, count: int) -> bytes:
        """Returns `Row.window_slots` for `count` positions from `start` on. Slots that the sequence had from `start` on
        are freed. A start of 0 begins a new sequence."""
        if not self._window:
            return b""
        held = self._held.setdefault(seq, deque())
        while held and held[-1][0] >= start:
            self._free.append(held.pop()[1])
        self.leave(seq, start)
        taken = [self._free.popleft() for _ in range(count)]
        held.extend(zip(range(start, start + count), taken, strict=True))
        return np.array(taken, np.int32).tobytes()

    def take_last(self, seq: int, position: int) -> bytes:
        """Frees a sequence's window slots, and takes new ones for the positions that the sequence's row at `position`
        attends to. Returns `NewSeq.prefix_window_slots`."""
        if not self._window:
            return b""
        held = self._held.get(seq, deque())
        while held:
            self._free.append(held.popleft()[1])
        start = max(position - self._window + 1, 0)
        return self.take(seq, start, position - start)

    def leave(self, seq: int, position: int) -> None:
        """Frees the slots that no row from `position` on reads. Call it between two plans."""
        held = self._held.get(seq, deque())
        while held and held[0][0] < position - self._window + 1:
            self._free.append(held.popleft()[1])
