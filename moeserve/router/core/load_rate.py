"""Whether reading KV from a tier beats computing it, by the measured rates of both."""

from __future__ import annotations

from collections.abc import Sequence

KEEP = 0.5  # of the rate so far, beside a new measurement
MOST_MS = 20_000.0  # of a load, while nobody knows what computing takes: no step was measured yet
RETRY_AFTER = 32  # prompts that were recomputed, after which a window of pages shows the tier's rate anew


class LoadRates:
    """Of some tiers, by number."""

    def __init__(self, num_tiers: int) -> None:
        self.bytes_per_ms: list[float | None] = [None] * num_tiers
        self.num_declined = [0] * num_tiers
        self._declined_since = [0] * num_tiers  # the last attempt

    def observe(self, tier: int, num_bytes: int, ms: float) -> None:
        """So many bytes came from the tier while it was busy for `ms` milliseconds."""
        if num_bytes <= 0 or ms <= 0.0:
            return
        rate = num_bytes / ms
        old = self.bytes_per_ms[tier]
        self.bytes_per_ms[tier] = rate if old is None else KEEP * old + (1.0 - KEEP) * rate

    def pays(self, num_bytes: Sequence[int], recompute_ms: float) -> bool:
        """Whether so many bytes of each tier are expected sooner from there than computed in `recompute_ms`; 0: nobody
        knows. A tier of unknown rate is tried."""
        return sum(self._ms(num_bytes)) < (recompute_ms or MOST_MS)

    def admits(self, num_bytes: Sequence[int], recompute_ms: float) -> bool:
        """`pays`, for a prompt whose load would begin. Where it does not, a rare one is let through to measure the tier
        that takes longest."""
        if self.pays(num_bytes, recompute_ms):
            return True
        ms = self._ms(num_bytes)
        slowest = ms.index(max(ms))
        self.num_declined[slowest] += 1
        self._declined_since[slowest] += 1
        if self._declined_since[slowest] < RETRY_AFTER:
            return False
        self._declined_since[slowest] = 0
        self.bytes_per_ms[slowest] = None
        return True

    def _ms(self, num_bytes: Sequence[int]) -> list[float]:
        rates = zip(num_bytes, self.bytes_per_ms, strict=True)
        return [0.0 if rate is None else size / rate for size, rate in rates]
