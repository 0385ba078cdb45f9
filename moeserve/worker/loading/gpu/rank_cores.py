"""Assigns cores to the ranks of several GPUs, for their RAM experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moeserve.processes.cpus import cores
from moeserve.worker.loading.cpu.thread_placement import SYSFS, memory_nodes, numbered_nodes


def cores_of_rank(rank: int, gpu_nodes: Sequence[int | None], sysfs: Path = SYSFS) -> list[int]:
    """Returns the CPUs of a rank, as whole cores. If every GPU is on a NUMA node with usable CPUs, the rank gets an
    even share of its GPU's node; else an even share of all. gpu_nodes: node of each rank's GPU, None if unknown.
    With fewer cores than GPUs, every rank gets all."""
    nodes = numbered_nodes(sysfs)
    node = gpu_nodes[rank]
    if node is not None and all(each in nodes for each in gpu_nodes):
        sharing = [other for other, each in enumerate(gpu_nodes) if each == node]
        return _part(nodes[node], sharing.index(rank), len(sharing), sysfs)
    everywhere = [cpu for cpus in memory_nodes(sysfs) for cpu in cpus]
    return _part(everywhere, rank, len(gpu_nodes), sysfs)


def _part(cpus: Sequence[int], part: int, parts: int, sysfs: Path) -> list[int]:
    by_core = cores(set(cpus), sysfs)
    if len(by_core) < parts:
        return sorted(cpus)
    first, end = len(by_core) * part // parts, len(by_core) * (part + 1) // parts
    return sorted(cpu for core in by_core[first:end] for cpu in core)


def gpu_node(device: int) -> int | None:
    """Returns the GPU's NUMA node; None if the kernel does not tell."""
    of: Any = torch.cuda.get_device_properties(device)  # older PyTorch versions lack the PCI address
    try:
        address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
        node = int((SYSFS / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError, AttributeError):
        return None
    return node if node >= 0 else None
