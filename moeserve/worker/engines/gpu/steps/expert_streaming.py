"""The fraction of the RAM experts that a step streams to the GPU, by its number of tokens; found by
`worker/engines/gpu/measure/calibration.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Streaming:
    """The fraction of the RAM experts that a step streams, as a function of its number of tokens. points:
    (tokens, fraction), ascending. The fraction is 0 below the first point, linear between points, and
    constant after the last."""

    points: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_tokens(cls, threshold: int) -> Streaming:
        """Returns a step function: nothing is streamed below `threshold` tokens, everything from there on."""
        return cls(((threshold, 1.0),))

    def part(self, tokens: int) -> float:
        if not self.points or tokens < self.points[0][0]:
            return 0.0
        for (low, before), (high, after) in zip(self.points, self.points[1:], strict=False):
            if tokens < high:
                return before + (after - before) * (tokens - low) / (high - low)
        return self.points[-1][1]
