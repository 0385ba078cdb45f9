"""Into how many parts steps go, where each GPU has some of the layers: measured at the start, with steps of nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.micro_batches import DECODE_PARTS, MicroBatches

GAIN = 0.97  # of the time of fewer parts: less is the clock's doing
LONGEST_S = 1.0  # a step of larger sizes goes as one half as large

log = logging.getLogger(__name__)


def choose_parts(engine: GpuEngine, batches: MicroBatches, of_leader: Callable[[int], int]) -> None:
    """Every rank calls it. of_leader: the first rank's value, on all ranks."""
    found = []
    for size in batches.decode_sizes:
        batches.decode_parts.remove(size)
        whole = _microseconds(engine.dummy_steps.decode(size), of_leader)
        batches.decode_parts.add(size)
        parted = _microseconds(engine.dummy_steps.decode(size), of_leader)
        if parted > GAIN * whole:
            batches.decode_parts.remove(size)
        found.append(f"{size} rows in 1: {whole / 1e3:.2f} ms, in {DECODE_PARTS}: {parted / 1e3:.2f}")
    taken = 0
    for size in engine.prompt_sizes:
        best = None
        of_size = []
        for parts in batches.choices(size):
            batches.parts[size] = parts
            taken = _microseconds(engine.dummy_steps.prompt(size, 0.0), of_leader)
            of_size.append(f"{parts}: {taken / 1e3:.1f}")
            if best is None or taken < GAIN * best[0]:
                best = taken, parts
        assert best is not None
        batches.parts[size] = best[1]
        found.append(f"a prompt of {size}, ms in parts of " + ", ".join(of_size))
        if taken > LONGEST_S * 1e6:
            break
    log.info("steps in parts over the GPUs: %s", "; ".join(found))


def _microseconds(run: Callable[[], None], of_leader: Callable[[int], int]) -> int:
    """The better of two, behind a first."""
    run()
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return of_leader(int(min(taken) * 1e6))
