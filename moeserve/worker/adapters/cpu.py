"""Reads the LoRA adapters of `--lora-modules` and prepares them for the CPU engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moeserve.config import ServerConfig
from moeserve.config.units import GIB, MIB
from moeserve.errors import ConfigError
from moeserve.models.adapters.adapter import Adapter
from moeserve.models.adapters.modules import DEFAULT_MOST
from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.blocks.cpu.lora import CpuAdapters
from moeserve.models.interface import ModelShape
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.worker.adapters.memory import AdapterMemory

log = logging.getLogger(__name__)


def read_adapters(checked: Sequence[PeftAdapter | GgufAdapter], memory: AdapterMemory) -> list[Adapter]:
    """Reads the adapters. Raises ConfigError if they do not fit in memory, AdapterError for values that are not
    finite."""
    wanted, free = memory.as_read + memory.resident, available_bytes()
    if wanted > free:
        raise ConfigError(
            f"--lora-modules: the adapters take {wanted / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory are "
            f"free{limit_note()}: free some memory, or serve fewer of them"
        )
    adapters = [adapter.read() for adapter in checked]
    for adapter in adapters:
        log.info(
            "adapter %s: %d products, rank up to %d, %.1f MiB",
            adapter.name,
            len(adapter.products),
            adapter.rank,
            adapter.num_bytes / MIB,
        )
    return adapters


def cpu_adapters(
    config: ServerConfig, shape: ModelShape, adapters: list[Adapter], tokens: int
) -> CpuAdapters | None:
    """Returns the CPU engine's adapters; None if the configuration allows none. tokens: rows of the largest step.
    Raises MemoryError."""
    if config.lora_dir is not None:
        return CpuAdapters(shape, adapters, tokens, config.max_loras or DEFAULT_MOST)
    return CpuAdapters(shape, adapters, tokens) if adapters else None
