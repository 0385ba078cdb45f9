"""The LoRA adapters of `--lora-modules`, read and checked against the model, and the room for those that come later."""

from __future__ import annotations

import logging
from pathlib import Path

from moeserve.adapters.adapter import Adapter
from moeserve.adapters.modules import DEFAULT_MEMORY_GIB, DEFAULT_MOST, parse_modules
from moeserve.adapters.open import open_adapter
from moeserve.adapters.read_gguf import GgufAdapter
from moeserve.adapters.read_peft import PeftAdapter
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.blocks.cpu.lora import CpuAdapters
from moeserve.models.interface import ModelShape
from moeserve.units import GIB, MIB
from moeserve.worker.memory import available_bytes, limit_note

log = logging.getLogger(__name__)


def open_adapters(config: ServerConfig, shape: ModelShape) -> list[PeftAdapter | GgufAdapter]:
    """By their headers alone. Raises AdapterError for one that does not fit the model."""
    return [
        open_adapter(name, Path(path), shape) for name, path in parse_modules(config.lora_modules).items()
    ]


def read_adapters(checked: list[PeftAdapter | GgufAdapter]) -> list[Adapter]:
    """Raises ConfigError where there is no memory for all, AdapterError for numbers that are not finite."""
    # Twice: as they are read, and as the kernels take them.
    wanted, free = sum(2 * adapter.nbytes for adapter in checked), available_bytes()
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


def later_bytes(config: ServerConfig) -> int:
    """RAM that is kept free for adapters that are loaded while the server runs."""
    if config.lora_dir is None:
        return 0
    return int((DEFAULT_MEMORY_GIB if config.lora_memory is None else config.lora_memory) * GIB)


def cpu_adapters(
    config: ServerConfig, shape: ModelShape, adapters: list[Adapter], tokens: int
) -> CpuAdapters | None:
    """None where there can never be any. tokens: of the largest step. Raises MemoryError."""
    if config.lora_dir is not None:
        return CpuAdapters(shape, adapters, tokens, config.max_loras or DEFAULT_MOST)
    return CpuAdapters(shape, adapters, tokens) if adapters else None
