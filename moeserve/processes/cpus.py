"""How many cores this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

from moeserve.processes.control_groups import cpu_quota

DRIVER_CORES = (
    8  # from this many cores on, the thread that drives a GPU has one: docs/results/experts-in-ram.md
)


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores of our CPU affinity (which holds a container's cpuset), no more than the control groups' CPU quota
    allows. Hyper-threads of one core count once: they share its vector units. At least 1. `root` has proc and sys."""
    physical = len(cores(os.sched_getaffinity(0), root / "sys"))
    return max(1, min(physical, cpu_quota(root) or physical))


def pool_threads(device: str, root: Path = Path("/")) -> int:
    """The default number of compute threads: a thread for each usable core; but of 8 cores or more, where
    there may be a GPU, one core stays free for the thread that drives it. device: --device."""
    count = usable_cores(root)
    may_have_gpu = device == "cuda" or (device == "auto" and (root / "proc/driver/nvidia/version").exists())
    return count - 1 if may_have_gpu and count >= DRIVER_CORES else count


def cores(cpus: set[int], sysfs: Path = Path("/sys")) -> list[list[int]]:
    """Those CPUs by physical core, in the order of each core's first CPU."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        by_core.setdefault(_core_of(cpu, sysfs), []).append(cpu)
    return list(by_core.values())


def _core_of(cpu: int, sysfs: Path) -> str:
    """The hyper-threads that share a CPU's core, which names the core; without sysfs every CPU is a core."""
    siblings = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(cpu)
