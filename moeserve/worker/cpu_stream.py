"""The CPU pool of a configuration, and whether its weights fit the RAM."""

from __future__ import annotations

import os
from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.units import GIB
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.memory import available_bytes, limit_note
from moeserve.worker.rank_cores import cores_of_rank, gpu_node
from moeserve.worker.thread_placement import place_threads


def open_stream(config: ServerConfig) -> CpuStream:
    """Raises ConfigError where the CPU lacks `config.isa` or the threads do not fit."""
    placements = place_threads(config.threads or 1, config.numa_nodes, config.cpu_binding)
    try:
        return CpuStream(placements, "" if config.isa == "auto" else config.isa)
    except ValueError as error:
        raise ConfigError(f"--isa or MOESERVE_ISA: {error}; leave it out, or say auto") from error


def open_rank_stream(config: ServerConfig, ranks: RankGroup) -> CpuStream:
    """The same for one of several GPUs, which has an even part of the threads, on cores at its memory node. This
    process keeps to them from here on."""
    nodes = [gpu_node(device) for device in ranks.devices] or [None] * ranks.num_ranks
    mine = cores_of_rank(ranks.rank, nodes)
    os.sched_setaffinity(0, mine)
    threads = max(1, (config.threads or 1) // ranks.num_ranks)
    return open_stream(replace(config, threads=threads))


def check_ram(weight_bytes: int, remedy: str = "or leave more experts to the GPU") -> None:
    """Raises ConfigError where so many bytes are not free."""
    free = available_bytes()
    if weight_bytes > free:
        raise ConfigError(
            f"the model's weights take {weight_bytes / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory are "
            f"free{limit_note()}: "
            f"free some memory, choose a smaller model or quantisation, {remedy}"
        )
