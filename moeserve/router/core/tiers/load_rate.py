"""Whether reading KV from a tier beats computing it, by the measured rates of both."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.pages import Tier, TierCounts

KEEP = 0.5  # of the bytes and of the time so far, beside a new measurement
MOST_MS = 20_000.0  # of a load, before a step was measured, while it is not known what computing takes
# Prompts that were recomputed, after which a window of pages shows the tier's rate anew; from RAM it costs little.
RETRY_AFTER: dict[Tier, int] = {"ram": 4, "disk": 32}


class LoadRates:
    """The load rates of some tiers, by number."""

    def __init__(self, tiers: Sequence[Tier], counts: Sequence[TierCounts]) -> None:
        """counts: one for each tier."""
        num_tiers = len(tiers)
        self._retry_after = [RETRY_AFTER[tier] for tier in tiers]
        self.bytes_per_ms: list[float | None] = [None] * num_tiers
        self.counts = counts
        self._declined_since = [0] * num_tiers  # the last attempt
        self._num_bytes = [0.0] * num_tiers  # that the rate is of
        self._ms = [0.0] * num_tiers
        self._ms_without_bytes = [0.0] * num_tiers  # since the last bytes

    def observe(self, tier: int, num_bytes: int, ms: float) -> None:
        """Notes that `num_bytes` came from the tier while it was busy for `ms` milliseconds. A page that was being read
        at one report and arrived before the next has its time in the first and its bytes in the second. So the rate is
        of sums, and time without bytes belongs to the next ones."""
        self._ms_without_bytes[tier] += ms
        if num_bytes <= 0:
            return
        self._num_bytes[tier] = KEEP * self._num_bytes[tier] + num_bytes
        self._ms[tier] = KEEP * self._ms[tier] + self._ms_without_bytes[tier]
        self._ms_without_bytes[tier] = 0.0
        if self._ms[tier] > 0.0:
            self.bytes_per_ms[tier] = self._num_bytes[tier] / self._ms[tier]

    def pays(self, num_bytes: Sequence[int], recompute_ms: float) -> bool:
        """Whether these bytes of each tier are expected sooner from there than computed in `recompute_ms`; 0: not
        known. A tier of unknown rate is tried."""
        return sum(self._times(num_bytes)) < (recompute_ms or MOST_MS)

    def admits(self, num_bytes: Sequence[int], recompute_ms: float) -> bool:
        """`pays`, for a prompt whose load would begin. Where it does not, a rare one is let through to measure the tier
        that takes longest."""
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
        """What was measured is another worker's."""
        for tier in range(len(self.bytes_per_ms)):
            self._forget(tier)

    def _forget(self, tier: int) -> None:
        self._declined_since[tier] = 0
        self.bytes_per_ms[tier] = None
        self._num_bytes[tier] = self._ms[tier] = self._ms_without_bytes[tier] = 0.0

    def _times(self, num_bytes: Sequence[int]) -> list[float]:
        """Milliseconds of each tier."""
        rates = zip(num_bytes, self.bytes_per_ms, strict=True)
        return [0.0 if rate is None else size / rate for size, rate in rates]
