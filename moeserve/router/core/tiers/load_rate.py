"""Decides whether loading KV from a tier is faster than computing it, by measured rates."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.pages import Tier, TierCounts

KEEP = 0.5  # decay of the sums of bytes and time per measurement
MOST_MS = 20_000.0  # longest load before any step was measured, while the time to compute is unknown
# After this many recomputed prompts one window of pages is loaded to measure the tier's rate again; from RAM it costs
# little.
RETRY_AFTER: dict[Tier, int] = {"ram": 4, "disk": 32}


class LoadRates:
    """The load rates of the tiers, by tier number."""

    def __init__(self, tiers: Sequence[Tier], counts: Sequence[TierCounts]) -> None:
        """counts: the counters of each tier."""
        num_tiers = len(tiers)
        self._retry_after = [RETRY_AFTER[tier] for tier in tiers]
        self.bytes_per_ms: list[float | None] = [None] * num_tiers
        self.counts = counts
        self._declined_since = [0] * num_tiers  # prompts recomputed since the last attempt
        self._num_bytes = [0.0] * num_tiers  # bytes in the measured rate
        self._ms = [0.0] * num_tiers
        self._ms_without_bytes = [0.0] * num_tiers  # milliseconds since the last bytes

    def observe(self, tier: int, num_bytes: int, ms: float) -> None:
        """Records that `num_bytes` arrived from a tier that was busy for `ms` milliseconds. If a page is being read
        when a report is made, its time so far is in this report and its bytes are in the next one. So time without
        bytes is added to the time of the next bytes, and the rate is a ratio of sums."""
        self._ms_without_bytes[tier] += ms
        if num_bytes <= 0:
            return
        self._num_bytes[tier] = KEEP * self._num_bytes[tier] + num_bytes
        self._ms[tier] = KEEP * self._ms[tier] + self._ms_without_bytes[tier]
        self._ms_without_bytes[tier] = 0.0
        if self._ms[tier] > 0.0:
            self.bytes_per_ms[tier] = self._num_bytes[tier] / self._ms[tier]

    def pays(self, num_bytes: Sequence[int], recompute_ms: float) -> bool:
        """Returns whether loading these bytes per tier is expected to be faster than computing, which takes
        `recompute_ms` (0: unknown). A tier with unknown rate is tried."""
        return sum(self._times(num_bytes)) < (recompute_ms or MOST_MS)

    def admits(self, num_bytes: Sequence[int], recompute_ms: float) -> bool:
        """Returns whether a load that would start now may start: if it `pays`. Occasionally returns True although the
        load does not pay, to measure the slowest tier."""
        if self.pays(num_bytes, recompute_ms):
            return True
        ms = self._times(num_bytes)
        slowest = ms.index(max(ms))
        self.counts[slowest].declined += 1
        self._declined_since[slowest] += 1
        if self._declined_since[slowest] < self._retry_after[slowest]:
            return False
        self._forget(slowest)
        return True

    def reset(self) -> None:
        """Forgets the rates, which belong to another worker."""
        for tier in range(len(self.bytes_per_ms)):
            self._forget(tier)

    def _forget(self, tier: int) -> None:
        self._declined_since[tier] = 0
        self.bytes_per_ms[tier] = None
        self._num_bytes[tier] = self._ms[tier] = self._ms_without_bytes[tier] = 0.0

    def _times(self, num_bytes: Sequence[int]) -> list[float]:
        """Returns the milliseconds per tier."""
        rates = zip(num_bytes, self.bytes_per_ms, strict=True)
        return [0.0 if rate is None else size / rate for size, rate in rates]
