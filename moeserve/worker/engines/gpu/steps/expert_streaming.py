"""Which part of the experts in RAM a step brings to the GPU, by its tokens. `worker/engines/gpu/measure/calibration.py`
finds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Streaming:
    """The part that a step streams: nothing below the first of `points`, (tokens, part) in ascending order; between two
    of them on a straight line; from the last on, its part."""

    points: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_tokens(cls, threshold: int) -> Streaming:
        """All or nothing."""
        return cls(((threshold, 1.0),))

    def part(self, tokens: int) -> float:
        if not self.points or tokens < self.points[0][0]:
            return 0.0
        for (low, before), (high, after) in zip(self.points, self.points[1:], strict=False):
            if tokens < high:
                return before + (after - before) * (tokens - low) / (high - low)
        return self.points[-1][1]
