"""Decides when a worker that computes a step counts as hung; the launcher then replaces it.

`launcher/standstill.py` does the same for a worker that loads its model, `launcher/heartbeats.py` for the other
processes.
"""

from __future__ import annotations

# Slack if the user set no limit. A step may be slow for reasons that no cost model knows: another process takes the
# cores, or the weights must be read from disk again.
GRACE_S = 30.0
TIMES_EXPECTED = 20.0
# limit before anything was measured; kernels may be compiled and weights read for the first time
UNKNOWN_S = 600.0


class StepDeadline:
    """Watches the oldest unanswered plan. limit_s: the longest step; None: derived from the expected duration.
    disk_wait_s: further time for a step that waits for a disk, because a slow disk is no reason to replace the worker;
    the worker itself gives up on a disk that hangs."""

    def __init__(self, limit_s: float | None, disk_wait_s: float = 0.0) -> None:
        self._limit_s, self._disk_wait_s = limit_s, disk_wait_s
        self._step: int | None = None
        self._due = 0.0

    def watch(self, awaited: tuple[int, float] | None, now: float) -> None:
        """Updates `due`; call it after every turn. awaited: the oldest step without a result and its expected
        milliseconds (0: unknown); None: no step. A step's time starts at the first call that names it. now: monotonic
        seconds."""
        if awaited is None:
            self._step = None
        elif awaited[0] != self._step:
            self._step = awaited[0]
            self._due = now + self._allowed_s(awaited[1])

    def _allowed_s(self, expected_ms: float) -> float:
        if self._limit_s is not None:
            return self._limit_s
        computing = GRACE_S + TIMES_EXPECTED * expected_ms / 1e3 if expected_ms else UNKNOWN_S
        return computing + self._disk_wait_s

    @property
    def due(self) -> float | None:
        """Returns the time, on the caller's clock, at which the worker counts as hung; None if nothing is awaited."""
        return None if self._step is None else self._due
