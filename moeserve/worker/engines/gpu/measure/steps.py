"""Times steps on a GPU before the first request: the starting point of the router's cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from moeserve.messages.steps import MeasuredStep
from moeserve.worker.engines.gpu.engine import GpuEngine

REPEATS = 3
DEEP = 8192  # position at which timed chunks in the middle of a prompt start
LARGEST_DEEP = 2048  # largest chunk timed there, in tokens
LONGEST_S = 0.6  # a longer step ends the series: the next one, twice as large, would delay the start


def measure_steps(
    engine: GpuEngine,
    max_num_seqs: int,
    max_model_len: int,
    agree: Callable[[float], float] | None = None,
    on_timed: Callable[[int, int], object] = lambda done, total: None,
) -> list[MeasuredStep]:
    """Times decode steps of 1, 2, 4 .. rows (up to the rows with drafts) at short contexts, and chunks of 16, 32 ..
    tokens at a prompt's beginning and deep in it, in a second or two. Returns one entry for each (chunks: for each
    position), with its milliseconds. Longer chunks than one of LONGEST_S seconds are not timed. May be called only
    before the first request. agree: makes the seconds equal on all GPUs, so that they run the same steps. on_timed:
    called with the number of sizes done and the maximum."""
    measured = []
    largest = min(engine.max_step_rows, max_model_len)
    decode_rows = min(max(max_num_seqs, engine.facts.max_drafts_size), engine.max_step_rows)
    decode, prompts = _powers_of_two(1, decode_rows), _powers_of_two(16, largest)
    total = len(decode) + len(prompts)
    for done, size in enumerate(decode):
        on_timed(done, total)
        seconds = _seconds(engine.dummy_steps.decode(size), agree)
        measured.append(MeasuredStep(size, size * (size + 1) // 2, 0, 0, seconds * 1e3))
    for done, size in enumerate(prompts, len(decode)):
        on_timed(done, total)
        for start in (0, DEEP):
            if start + size > max_model_len or (start and size > LARGEST_DEEP):
                continue
            seconds = _seconds(engine.dummy_steps.prompt(size, engine.streaming.part(size), start), agree)
            measured.append(MeasuredStep(0, 0, start, size, seconds * 1e3))
        if seconds > LONGEST_S:
            break
    return measured


def _seconds(run: Callable[[], None], agree: Callable[[float], float] | None) -> float:
    run()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        taken.append(seconds if agree is None else agree(seconds))
        if taken[-1] > LONGEST_S:
            break
    return median(taken)


def _powers_of_two(low: int, high: int) -> list[int]:
    return [1 << e for e in range(high.bit_length()) if low <= 1 << e <= high]
