"""Opens the CPU pool of a configuration, and checks that weights fit in RAM."""

from __future__ import annotations

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.worker.loading.cpu.thread_placement import place_threads


def open_stream(config: ServerConfig) -> CpuStream:
    """Opens the pool. Raises ConfigError if the CPU lacks `config.isa` or the threads do not fit."""
    placements = place_threads(config.threads or 1, config.numa_nodes, config.cpu_binding)
    try:
        return CpuStream(placements, "" if config.isa == "auto" else config.isa)
    except ValueError as error:
        raise ConfigError(f"--isa or MOESERVE_ISA: {error}; leave it out, or say auto") from error


def check_ram(weight_bytes: int, remedy: str = "or leave more experts to the GPU") -> None:
    """Raises ConfigError if fewer than `weight_bytes` bytes are free."""
    free = available_bytes()
    if weight_bytes > free:
        raise ConfigError(
            f"the model's weights take {weight_bytes / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory are "
            f"free{limit_note()}: "
            f"free some memory, choose a smaller model or quantisation, {remedy}"
        )
