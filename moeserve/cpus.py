"""How many cores this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(sysfs: Path = Path("/sys")) -> int:
    """Physical cores of our CPU affinity (which holds a container's cpuset), no more than the control group's
    CPU quota allows (cgroup v2, cpu.max). Hyper-threads of one core count once: they share its vector units.
    At least 1."""
    return max(1, min(len(cores(os.sched_getaffinity(0), sysfs)), _quota(sysfs)))


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


def _quota(sysfs: Path) -> int:
    """Cores' worth of time the control group may use, rounded up; our own group is the root of a container's
    view."""
    try:
        quota, period = (sysfs / "fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return os.cpu_count() or 1 if quota == "max" else math.ceil(int(quota) / int(period))
