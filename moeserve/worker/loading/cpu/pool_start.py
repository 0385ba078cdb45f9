"""Opens the CPU pool of a configuration, and checks that weights fit in RAM."""

from __future__ import annotations

import logging
from collections import Counter

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.sources.source import ModelSource
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.quantization import QUANT_TYPES
from moeserve.worker.loading.cpu.thread_placement import place_threads

log = logging.getLogger(__name__)


def open_stream(config: ServerConfig) -> CpuStream:
    """Opens the pool. Raises ConfigError if the CPU lacks `config.isa` or the threads do not fit."""
    placements = place_threads(config.threads or 1, config.numa_nodes, config.cpu_binding)
    try:
        return CpuStream(placements, "" if config.isa == "auto" else config.isa)
    except ValueError as error:
        raise ConfigError(f"--isa or MOESERVE_ISA: {error}; leave it out, or say auto") from error


def choose_products(stream: CpuStream, config: ServerConfig, source: ModelSource) -> None:
    """Lets the pool choose among this CPU's instruction sets by measurement, unless `--isa` names one. Weights that are
    used in place keep the best one by its name: they were not measured."""
    if config.isa != "auto" or config.weight_layout == "file":
        return
    num_bytes = Counter[int]()
    for tensor in source.tensors.values():
        num_bytes[tensor.type.number] += tensor.nbytes
    chosen = stream.choose_products([kind for kind, _ in num_bytes.most_common()], num_bytes.total())
    by_isa: dict[str, list[str]] = {}
    for choice in chosen:
        name, tokens = (
            QUANT_TYPES[choice.type].name,
            "1 token" if choice.tokens == 1 else f"{choice.tokens} tokens",
        )
        by_isa.setdefault(choice.isa, []).append(f"{name} with {tokens} ({choice.speed:.2f} times as fast)")
    for isa, products in by_isa.items():
        log.info("faster with %s than with %s, by measurement: %s", isa, stream.isa, ", ".join(products))


def check_ram(weight_bytes: int, remedy: str = "or leave more experts to the GPU") -> None:
    """Raises ConfigError if fewer than `weight_bytes` bytes are free."""
    free = available_bytes()
    if weight_bytes > free:
        raise ConfigError(
            f"the model's weights take {weight_bytes / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory are "
            f"free{limit_note()}: "
            f"free some memory, choose a smaller model or quantisation, {remedy}"
        )
