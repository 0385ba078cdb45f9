"""How long a worker may take over a step before it counts as hung: then the launcher replaces it.

Other waits: `launcher/standstill.py` while it loads, `launcher/heartbeats.py` for the other processes."""

from __future__ import annotations

# Where the user names no limit. A step may be slow for reasons that no model of its cost knows: another process takes
# the cores, the weights have to be read from disk again.
GRACE_S = 30.0
TIMES_EXPECTED = 20.0
UNKNOWN_S = 600.0  # nothing was measured yet; kernels may be compiled, and weights be read for the first time


class StepDeadline:
    """Watches the oldest plan that is not answered. `limit_s`: the longest step; None: by what it should take."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._step: int | None = None
        self._due = 0.0

    def watch(self, awaited: tuple[int, float] | None, now: float) -> None:
        """Called after every turn: the step whose result is awaited and its expected milliseconds, 0 where they are not
        known. A step's time begins when it becomes the oldest."""
        if awaited is None:
            self._step = None
        elif awaited[0] != self._step:
            self._step = awaited[0]
            self._due = now + self._allowed_s(awaited[1])

    def _allowed_s(self, expected_ms: float) -> float:
        if self._limit_s is not None:
            return self._limit_s
        return GRACE_S + TIMES_EXPECTED * expected_ms / 1e3 if expected_ms else UNKNOWN_S

    @property
    def due(self) -> float | None:
        """When the worker counts as hung, in the caller's clock; None: nothing is awaited."""
        return None if self._step is None else self._due
