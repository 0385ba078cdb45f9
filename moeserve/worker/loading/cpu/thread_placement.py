"""Assigns NUMA nodes and cores to the compute threads."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from moeserve.errors import ConfigError
from moeserve.kernels.stream_operands import ThreadPlacement
from moeserve.processes.cpus import cores

SYSFS = Path("/sys")


def place_threads(
    threads: int, num_nodes: int | None, binding: str, sysfs: Path = SYSFS
) -> list[ThreadPlacement]:
    """Returns one placement per thread, node by node. Only CPUs of the process's affinity (a container's cpuset) are
    used.

    Threads and weights are divided evenly among `num_nodes` NUMA nodes; None: the machine's number. More nodes than
    the machine has are formed from its cores. Binding "cores" gives each thread its own core; "nodes" keeps threads
    on their node; "none" leaves them to the kernel. "auto" is "cores" if there are enough cores, else "nodes":
    unbound threads that wake together may share a core until the next scheduler tick. Raises ConfigError for fewer
    threads than nodes, and for binding more threads than there are cores.
    """
    machine = memory_nodes(sysfs)
    if num_nodes is None:
        machine = machine[: max(1, min(len(machine), threads))]
        num_nodes = len(machine)
    if threads < num_nodes:
        raise ConfigError(
            f"--numa-nodes {num_nodes} needs at least as many --threads, not {threads}; raise --threads "
            "or lower --numa-nodes"
        )
    if len(machine) != num_nodes:
        machine = _divide([cpu for node in machine for cpu in node], num_nodes)
    if binding == "auto":
        binding = "cores" if _enough_cores(machine, threads, sysfs) else "nodes"
    return [
        ThreadPlacement(node, cpus)
        for node, own in enumerate(_divide(list(range(threads)), num_nodes))
        for cpus in _bound(machine[node], len(own), binding, sysfs)
    ]


def memory_nodes(sysfs: Path = SYSFS) -> list[list[int]]:
    """Returns the usable CPUs by NUMA node; nodes without usable CPUs are left out. One node if sysfs has no
    information."""
    return list(numbered_nodes(sysfs).values()) or [sorted(os.sched_getaffinity(0))]


def numbered_nodes(sysfs: Path = SYSFS) -> dict[int, list[int]]:
    """Returns the CPUs of each node by the kernel's node numbers, ascending; empty if sysfs has none."""
    allowed = os.sched_getaffinity(0)
    numbered = {
        int(path.parent.name.removeprefix("node")): path
        for path in (sysfs / "devices/system/node").glob("node[0-9]*/cpulist")
    }
    nodes = {
        number: [cpu for cpu in _cpu_list(path.read_text()) if cpu in allowed]
        for number, path in sorted(numbered.items())
    }
    return {number: cpus for number, cpus in nodes.items() if cpus}


def _bound(cpus: Sequence[int], threads: int, binding: str, sysfs: Path) -> list[tuple[int, ...]]:
    """Returns the CPUs that each of a node's threads is bound to."""
    if binding == "none":
        return [()] * threads
    if binding == "nodes" and cpus:
        return [tuple(cpus)] * threads
    own = cores(set(cpus), sysfs)
    if len(own) < threads:
        raise ConfigError(
            f"--cpu-binding {binding}: {threads} threads do not fit the {len(own)} cores of their NUMA node: "
            "lower --threads, or choose another binding"
        )
    return [tuple(core) for core in own[:threads]]


def _enough_cores(nodes: list[list[int]], threads: int, sysfs: Path) -> bool:
    most = -(-threads // len(nodes))
    return all(len(cores(set(node), sysfs)) >= most for node in nodes)


def _divide(items: list[int], parts: int) -> list[list[int]]:
    """Contiguous parts whose lengths differ by at most one."""
    return [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]


def _cpu_list(text: str) -> list[int]:
    """The kernel's list format, "0-3,8"."""
    cpus: list[int] = []
    for part in re.findall(r"(\d+)(?:-(\d+))?", text):
        first, last = int(part[0]), int(part[1] or part[0])
        cpus += range(first, last + 1)
    return cpus
