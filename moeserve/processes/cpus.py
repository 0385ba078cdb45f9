"""Counts the cores that this process can use."""

from __future__ import annotations

import os
from pathlib import Path

from moeserve.processes.control_groups import cpu_quota

DRIVER_CORES = (
    # from this many cores on, one is left to the thread that drives the GPU: docs/results/experts-in-ram.md
    8
)


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the number of physical cores in this process's CPU affinity (which includes a container's cpuset), at
    most the CPU quota of its control groups, at least 1. Hyper-threads of one core count once because they share its
    vector units. `root` contains proc and sys."""
    physical = len(cores(os.sched_getaffinity(0), root / "sys"))
    return max(1, min(physical, cpu_quota(root) or physical))


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns the number of CPUs, each hyper-thread counted, in this process's CPU affinity, at most the CPU quota of
    its control groups. More threads than the quota has cores would use it up at the beginning of each of the kernel's
    periods of 0.1 s, and then all wait."""
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, cpu_quota(root) or allowed)


def pool_threads(device: str, root: Path = Path("/")) -> int:
    """Returns the default number of compute threads: one per usable core. If a GPU may be used and there are at
    least 8 cores, one core is left to the thread that drives the GPU. device: value of --device."""
    count = usable_cores(root)
    may_have_gpu = device == "cuda" or (device == "auto" and (root / "proc/driver/nvidia/version").exists())
    return count - 1 if may_have_gpu and count >= DRIVER_CORES else count


def cores(cpus: set[int], sysfs: Path = Path("/sys")) -> list[list[int]]:
    """Groups CPU numbers by physical core, in the order of each core's first CPU."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        by_core.setdefault(_core_of(cpu, sysfs), []).append(cpu)
    return list(by_core.values())


def _core_of(cpu: int, sysfs: Path) -> str:
    """Returns sysfs's list of the hyper-threads on a CPU's core, which identifies the core. Without sysfs each CPU
    is its own core."""
    siblings = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(cpu)
