"""What the worker says of its expert cache."""

from __future__ import annotations

import msgspec


class ExpertCacheCounts(msgspec.Struct, frozen=True, array_like=True):
    """Of one step, or of several: a step counts each expert of a layer once, however many tokens use it."""

    hits: int = 0  # experts that a step used and found in GPU memory
    misses: int = 0  # those that the CPU computed
    promotions: int = 0  # experts brought to GPU memory
    bytes: int = 0  # of their weights, as they are copied

    def plus(self, other: ExpertCacheCounts) -> ExpertCacheCounts:
        return ExpertCacheCounts(
            self.hits + other.hits,
            self.misses + other.misses,
            self.promotions + other.promotions,
            self.bytes + other.bytes,
        )

    def since(self, before: ExpertCacheCounts) -> ExpertCacheCounts:
        return ExpertCacheCounts(
            self.hits - before.hits,
            self.misses - before.misses,
            self.promotions - before.promotions,
            self.bytes - before.bytes,
        )

    @property
    def hit_rate(self) -> float:
        """0 .. 1; 0 where nothing was used."""
        return self.hits / max(1, self.hits + self.misses)
