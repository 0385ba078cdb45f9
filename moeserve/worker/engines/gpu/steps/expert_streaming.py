"""Which part of the experts in RAM a step brings to the GPU, by its tokens. `worker/engines/gpu/measure/calibration.py`
finds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Streaming:
    """The part of RAM experts that a step streams. `points`: (tokens, part) in ascending order; the part is 0
    below the first, linear between two, and constant after the last."""

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
