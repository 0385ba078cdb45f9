"""Records when the CPU pool's threads entered each phase of an operation, and their work: csrc/pool/phase_times.h."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels._C import Pool

# Times are in ticks of the CPU's counter, `ticks_per_second`. entered, begun, over: when a thread entered the
# phase, had no unit left to begin, and found the phase over. ahead: ticks before `over` that it spent on the small
# operations after this one.
PHASE_TIMES = np.dtype(
    [
        ("phase", np.uint64),  # counted over the life of the pool
        ("operation", np.uint16),  # index in `operation_names`
        ("number", np.uint16),  # number of the phase within it, from 1
        ("units", np.uint32),  # computed by this thread
        ("entered", np.int64),
        ("begun", np.int64),
        ("over", np.int64),
        ("ahead", np.int64),
    ]
)
Times = npt.NDArray[np.void]


def time_phases(pool: Pool, room: int) -> None:
    """Makes each thread record its next `room` phases; 0: none. Waits for the pool."""
    pool.time_phases(room)


def phase_times(pool: Pool) -> list[Times]:
    """Returns each thread's recorded phases (dtype PHASE_TIMES), in order, since `time_phases`. The pool must be
    idle."""
    return [np.frombuffer(pool.phase_times(thread), PHASE_TIMES) for thread in range(pool.threads)]


def operation_names(pool: Pool) -> list[str]:
    """Returns the operations' C++ types, without namespaces and template arguments."""
    return [name.partition("<")[0].split("::")[-1] or name for name in pool.operation_names]


def phase_ticks() -> int:
    """Returns the current time in ticks."""
    return Pool.phase_ticks()


def ticks_per_second() -> float:
    """Measures the ticks per second; takes 10 ms."""
    return Pool.phase_ticks_per_second()
