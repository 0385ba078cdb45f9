"""Chooses, by timing dummy steps at start-up, into how many parts steps are divided if each GPU has some of the
layers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.step_path import DECODE_PARTS, decode_sizes_in_parts, part_choices

GAIN = 0.97  # more parts must take at most this fraction of the time; smaller gains may be noise
LONGEST_S = 1.0  # larger sizes are not timed; they get the choice of half their size

log = logging.getLogger(__name__)


def choose_parts(engine: GpuEngine, max_model_len: int, of_leader: Callable[[int], int]) -> None:
    """Sets the engine's division of steps. Every rank calls it. max_model_len: tokens of the longest request.
    of_leader: returns the first rank's value on all ranks."""
    found = [
        *_choose_decode_parts(engine, of_leader),
        *_choose_prompt_parts(engine, max_model_len, of_leader),
    ]
    log.info("steps in parts over the GPUs: %s", "; ".join(found))


def _choose_decode_parts(engine: GpuEngine, of_leader: Callable[[int], int]) -> Iterator[str]:
    divided: set[int] = set()
    for size in decode_sizes_in_parts(engine.facts):
        engine.paths.divide_decode_steps(divided)
        whole = _microseconds(engine.dummy_steps.decode(size), of_leader)
        engine.paths.divide_decode_steps(divided | {size})
        parted = _microseconds(engine.dummy_steps.decode(size), of_leader)
        if parted <= GAIN * whole:
            divided.add(size)
        yield f"{size} rows in 1: {whole / 1e3:.2f} ms, in {DECODE_PARTS}: {parted / 1e3:.2f}"
    engine.paths.divide_decode_steps(divided)


def _choose_prompt_parts(
    engine: GpuEngine, max_model_len: int, of_leader: Callable[[int], int]
) -> Iterator[str]:
    for size in engine.prompt_sizes:
        if size > max_model_len:  # a dummy prompt is one request, and its row of the slot table ends there
            break
        taken = {}
        best = 1
        for parts in part_choices(size):
            engine.paths.divide_prompts(size, parts)
            taken[parts] = _microseconds(engine.dummy_steps.prompt(size, 0.0), of_leader)
            if taken[parts] < GAIN * taken[best]:
                best = parts
        engine.paths.divide_prompts(size, best)
        in_parts = ", ".join(f"{parts}: {each / 1e3:.1f}" for parts, each in taken.items())
        yield f"a prompt of {size}, ms in parts of {in_parts}"
        if taken[max(taken)] > LONGEST_S * 1e6:
            break


def _microseconds(run: Callable[[], None], of_leader: Callable[[int], int]) -> int:
    """Returns the shorter time of two runs, after a warm-up run."""
    run()
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return of_leader(int(min(taken) * 1e6))
