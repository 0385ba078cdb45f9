"""Whether reading KV from disk beats computing it, by the measured rates of both."""

from __future__ import annotations

KEEP = 0.5  # of the rate so far, beside a new measurement
MOST_MS = 20_000.0  # of a load, while nobody knows what computing takes: no step was measured yet
RETRY_AFTER = 32  # prompts that were recomputed, after which a window of pages shows the disk's rate anew


class LoadRate:
    def __init__(self) -> None:
        self.bytes_per_ms: float | None = None
        self.num_declined = 0
        self._declined_since = 0  # the last attempt

    def observe(self, num_bytes: int, ms: float) -> None:
        """So many bytes came from disk while it was busy for `ms` milliseconds."""
        if num_bytes <= 0 or ms <= 0.0:
            return
        rate = num_bytes / ms
        old = self.bytes_per_ms
        self.bytes_per_ms = rate if old is None else KEEP * old + (1.0 - KEEP) * rate

    def pays(self, num_bytes: int, recompute_ms: float) -> bool:
        """Whether so many bytes are expected sooner from disk than computed in `recompute_ms`; 0: nobody knows. A disk
        of unknown rate is tried."""
        rate = self.bytes_per_ms
        return rate is None or num_bytes / rate < (recompute_ms or MOST_MS)

    def admits(self, num_bytes: int, recompute_ms: float) -> bool:
        """`pays`, for a prompt whose load would begin. Where it does not, a rare one is let through to measure."""
        if self.pays(num_bytes, recompute_ms):
            return True
        self.num_declined += 1
        self._declined_since += 1
        if self._declined_since < RETRY_AFTER:
            return False
        self._declined_since = 0
        self.bytes_per_ms = None
        return True
