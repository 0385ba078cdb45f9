"""Which part of the experts in RAM a step brings to the GPU, and leaves the others to the CPU: measured at the start.

The CPU's time grows with the tokens, that of copying weights hardly does. Few tokens are the CPU's and many the GPU's;
between them both work at once, each at a part of the experts, such that they end together:

    time to stream all * part = the CPU's own time + its time for all experts * (1 - part)

Whole steps are timed, on the machine as it is at start-up. The CPU's own time, which a step costs it whatever its part
(while the GPU does its part of a layer, it waits), is seen from a step that shares; a first guess takes it for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming

MEASURABLE = 1.03  # times as long
FAR = 3.5

TimeStep = Callable[[int, float], float]  # (tokens, part streamed) -> seconds


@dataclass(frozen=True, slots=True)
class Calibration:
    # Tokens from which on streaming all is not slower than the CPU alone; None: not found.
    threshold: int | None
    streaming: Streaming

    def described(self) -> str:
        """For the line that the log has when the server is ready."""
        parts = [(n, part) for n, part in self.streaming.points if part > 0.0]
        if not parts:
            return "never streamed"
        shared = ", in part at first" if parts[0][1] < 1.0 else ""
        alone = "" if self.threshold is None else f"; alone it is faster from {self.threshold} on"
        return f"streamed to steps of {parts[0][0]} tokens on{shared}{alone if shared else ''}"


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of steps by their number of tokens."""

    tokens: int
    on_cpu: float
    streamed: float

    def shared(self, time_step: TimeStep) -> tuple[float, float]:
        """The part at which both ways end together, and the step's seconds."""
        guess = self.on_cpu / (self.on_cpu + self.streamed)
        seconds = time_step(self.tokens, guess)
        if seconds < MEASURABLE * guess * self.streamed:  # it was the stream that was waited for
            return guess, seconds
        saved = max(self.on_cpu - seconds, 0.0) / guess  # of the CPU's time, by streaming all
        part = min(self.on_cpu / (saved + self.streamed), 1.0)
        return min((guess, seconds), (part, time_step(self.tokens, part)), key=lambda found: found[1])


def calibrate(time_step: TimeStep, sizes: Sequence[int]) -> Calibration:
    """Times steps of `sizes` tokens (ascending, each twice the one before) in each way. The CPU alone is timed until it
    is slower than streaming; from there on its time goes on in a straight line. Stops where it would take FAR times as
    long as streaming: sharing gains little then, and twice as many tokens stream all."""
    times: list[_Times] = []
    threshold: int | None = None
    points: list[tuple[int, float]] = []
    for size in sizes:
        streamed = time_step(size, 1.0)
        on_cpu = time_step(size, 0.0) if threshold is None else _continued(times, size)
        times.append(_Times(size, on_cpu, streamed))
        if threshold is None and streamed <= on_cpu:
            threshold = size if len(times) == 1 else _crossing(*times[-2:])
        part, shared = times[-1].shared(time_step)
        if shared >= min(on_cpu, streamed):
            part = 0.0 if on_cpu < streamed else 1.0
        if threshold is not None and part == 1.0 and (not points or points[-1][1] == 0.0):
            points += [(threshold - 1, 0.0), (threshold, 1.0)]  # nothing to share between
            break
        points.append((size, part))
        if part == 1.0 or on_cpu >= FAR * streamed:
            break
    if points and threshold is not None and points[-1][1] < 1.0:
        points.append((2 * points[-1][0], 1.0))
    return Calibration(threshold, Streaming(tuple(points)))


def _continued(times: Sequence[_Times], tokens: int) -> float:
    """The CPU's seconds on the line through the last two, or through the last and nothing."""
    last = times[-1]
    before = times[-2] if len(times) > 1 else _Times(0, 0.0, 0.0)
    slope = (last.on_cpu - before.on_cpu) / (last.tokens - before.tokens)
    return last.on_cpu + slope * (tokens - last.tokens)


def _crossing(low: _Times, high: _Times) -> int:
    """Where the CPU's line meets the stream's."""
    lost = low.streamed - low.on_cpu  # by the stream, at the lower number
    won = high.on_cpu - high.streamed
    return round(low.tokens + (high.tokens - low.tokens) * lost / (lost + won))
