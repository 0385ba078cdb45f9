"""When the CPU pool's threads came to each phase, and what they did there: csrc/pool/phase_times.h."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels._C import Pool

# Ticks are of the CPU's counter, `ticks_per_second`. entered, begun, over: when a thread came to the phase, had nothing
# left to begin, and found the phase over. ahead: for how long, before `begun`, it computed the small operations behind.
PHASE_TIMES = np.dtype(
    [
        ("phase", np.uint64),  # counted over the life of the pool
        ("operation", np.uint16),  # what `operation_names` names
        ("number", np.uint16),  # of the phase within it, from 1 on
        ("units", np.uint32),  # that this thread computed
        ("entered", np.int64),
        ("begun", np.int64),
        ("over", np.int64),
        ("ahead", np.int64),
    ]
)
Times = npt.NDArray[np.void]


def time_phases(pool: Pool, room: int) -> None:
    """From now on each thread keeps the times of its next `room` phases; 0: of none. Waits for the pool."""
    pool.time_phases(room)


def phase_times(pool: Pool) -> list[Times]:
    """PHASE_TIMES of each thread's phases, in order, since `time_phases`. The pool is idle."""
    return [np.frombuffer(pool.phase_times(thread), PHASE_TIMES) for thread in range(pool.threads)]


def operation_names(pool: Pool) -> list[str]:
    """C++ types, without namespaces and template arguments."""
    return [name.partition("<")[0].split("::")[-1] or name for name in pool.operation_names]


def phase_ticks() -> int:
    """Now, in ticks."""
    return Pool.phase_ticks()


def ticks_per_second() -> float:
    """Takes 10 ms."""
    return Pool.phase_ticks_per_second()
