"""From how many tokens on it is faster to bring the RAM experts' weights to the GPU than to compute them on the CPU.

Whole steps are timed, on the machine as it is at start-up: the CPU's time grows with the tokens, the stream's hardly
does, and the two lines cross where the threshold is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

TimeStep = Callable[[int, bool], float]  # (tokens, streamed) -> seconds


def crossover(time_step: TimeStep, sizes: Sequence[int]) -> int | None:
    """The smallest number of tokens at which streaming is not slower, between two of `sizes` (ascending) by straight
    lines; None where it is slower at all of them. Stops measuring where it has crossed."""
    before: tuple[int, float, float] | None = None
    for size in sizes:
        on_cpu, streamed = time_step(size, False), time_step(size, True)
        if streamed <= on_cpu:
            return size if before is None else _between(before, (size, on_cpu, streamed))
        before = (size, on_cpu, streamed)
    return None


def _between(low: tuple[int, float, float], high: tuple[int, float, float]) -> int:
    """Where the CPU's line meets the stream's."""
    gap_low, gap_high = low[2] - low[1], high[1] - high[2]  # the stream's disadvantage, its advantage
    return round(low[0] + (high[0] - low[0]) * gap_low / (gap_low + gap_high))
