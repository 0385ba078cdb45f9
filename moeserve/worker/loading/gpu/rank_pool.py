"""The CPU pool of one of several GPUs; separate from `pool_start.py`, which must work without Triton."""

from __future__ import annotations

import os
from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.loading.cpu.pool_start import open_stream
from moeserve.worker.loading.gpu.rank_cores import cores_of_rank, gpu_node


def open_rank_stream(config: ServerConfig, ranks: RankGroup) -> CpuStream:
    """Starts a rank's CPU pool and returns its stream: an even share of the threads, on cores of its GPU's NUMA node.
    Binds this process to that node. Raises ConfigError as `open_stream` does."""
    nodes = [gpu_node(device) for device in ranks.devices] or [None] * ranks.num_ranks
    mine = cores_of_rank(ranks.rank, nodes)
    os.sched_setaffinity(0, mine)
    threads = max(1, (config.threads or 1) // ranks.num_ranks)
    return open_stream(replace(config, threads=threads))
