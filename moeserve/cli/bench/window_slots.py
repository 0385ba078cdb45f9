"""Slots of the windowed layers' KV pool for a bench that drives a worker itself."""

from __future__ import annotations

from collections import deque

import numpy as np

from moeserve.messages.steps import WorkerReady


class WindowSlots:
    """Hands out window slots as a router does: slots that no later row of a sequence reads are free for the next
    plan."""

    def __init__(self, ready: WorkerReady) -> None:
        self._window = ready.window
        self._free: deque[int] = deque(range(ready.num_window_slots))
        self._held: dict[int, deque[tuple[int, int]]] = {}  # by sequence: positions and slots, ascending

    def take(self, seq: int, start: int, count: int) -> bytes:
        """For `Row.window_slots` of the positions from `start` on. What was at them before is computed again, so that a
        sequence that starts at 0 is a new one."""
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
        """Frees a sequence's window slots and takes new ones for the positions that its row at `position` attends
        to: the value of `NewSeq.prefix_window_slots`."""
        if not self._window:
            return b""
        held = self._held.get(seq, deque())
        while held:
            self._free.append(held.popleft()[1])
        start = max(position - self._window + 1, 0)
        return self.take(seq, start, position - start)

    def leave(self, seq: int, position: int) -> None:
        """Between two plans: a sequence goes on at this position. What no row from there on reads is free."""
        held = self._held.get(seq, deque())
        while held and held[0][0] < position - self._window + 1:
            self._free.append(held.popleft()[1])
