"""Chooses, by measurement at start-up, the fraction of the RAM experts that a step streams to the GPU; the CPU
computes the rest.

The CPU's time grows with the tokens, while the time to copy weights hardly does. So the CPU computes few tokens and
the GPU many; in between both work at once, each on a fraction of the experts such that they finish together:

    time to stream all * fraction = fixed CPU time + CPU time for all experts * (1 - fraction)

Whole steps are timed on the actual machine. The fixed CPU time, which a step costs whatever the fraction (the CPU
also waits while the GPU does its part of a layer), is derived from a step that shares; the first guess is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming

MEASURABLE = 1.03  # smallest ratio of times that counts as a difference
FAR = 3.5

TimeStep = Callable[[int, float], float]  # (tokens, fraction streamed) -> seconds


@dataclass(frozen=True, slots=True)
class Calibration:
    # The smallest number of tokens for which streaming all experts is not slower than computing all on the CPU; None:
    # not found.
    threshold: int | None
    streaming: Streaming

    def described(self) -> str:
        """Returns a description for the log when the server is ready."""
        parts = [(n, part) for n, part in self.streaming.points if part > 0.0]
        if not parts:
            return "never streamed"
        shared = ", in part at first" if parts[0][1] < 1.0 else ""
        alone = "" if self.threshold is None else f"; alone it is faster from {self.threshold} on"
        return f"streamed to steps of {parts[0][0]} tokens on{shared}{alone if shared else ''}"


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of steps with this number of tokens, all on the CPU or all streamed."""

    tokens: int
    on_cpu: float
    streamed: float

    def shared(self, time_step: TimeStep) -> tuple[float, float]:
        """Estimates which fraction of the experts to stream so that CPU and GPU finish a step together. Returns it, and
        the measured seconds of a step with it."""
        guess = self.on_cpu / (self.on_cpu + self.streamed)
        seconds = time_step(self.tokens, guess)
        if seconds < MEASURABLE * guess * self.streamed:  # streaming was the bottleneck
            return guess, seconds
        saved = max(self.on_cpu - seconds, 0.0) / guess  # CPU time that streaming all would save
        part = min(self.on_cpu / (saved + self.streamed), 1.0)
        return min((guess, seconds), (part, time_step(self.tokens, part)), key=lambda found: found[1])


def calibrate(time_step: TimeStep, sizes: Sequence[int]) -> Calibration:
    """Times steps of `sizes` tokens (ascending, doubling), once with all experts on the CPU and once with all streamed,
    and returns the fraction to stream by number of tokens, with the times. time_step(tokens, fraction): returns the
    seconds of a step. Once the CPU is slower, its further times are extrapolated linearly. Stops when the CPU would
    take FAR times as long as streaming: sharing gains little there, and from twice that many tokens on, all experts are
    streamed."""
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
            points += [(threshold - 1, 0.0), (threshold, 1.0)]  # no range in which sharing pays
            break
        points.append((size, part))
        if part == 1.0 or on_cpu >= FAR * streamed:
            break
    if points and threshold is not None and points[-1][1] < 1.0:
        points.append((2 * points[-1][0], 1.0))
    return Calibration(threshold, Streaming(tuple(points)))


def _continued(times: Sequence[_Times], tokens: int) -> float:
    """Returns the CPU's seconds on the line through the last two measurements, or through the last and the origin."""
    last = times[-1]
    before = times[-2] if len(times) > 1 else _Times(0, 0.0, 0.0)
    slope = (last.on_cpu - before.on_cpu) / (last.tokens - before.tokens)
    return last.on_cpu + slope * (tokens - last.tokens)


def _crossing(low: _Times, high: _Times) -> int:
    """Returns the number of tokens at which the CPU's and the streaming line cross."""
    lost = low.streamed - low.on_cpu  # seconds by which streaming is slower at the lower number
    won = high.on_cpu - high.streamed
    return round(low.tokens + (high.tokens - low.tokens) * lost / (lost + won))
