"""The LoRA adapters of `--lora-modules`, read and checked against the model."""

from __future__ import annotations

import logging
from pathlib import Path

from moeserve.adapters.adapter import Adapter
from moeserve.adapters.modules import parse_modules
from moeserve.adapters.open import open_adapter
from moeserve.adapters.read_gguf import GgufAdapter
from moeserve.adapters.read_peft import PeftAdapter
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
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
            adapter_bytes([adapter]) / MIB,
        )
    return adapters


def adapter_bytes(adapters: list[Adapter]) -> int:
    """Of their matrices."""
    return sum(pair.a.nbytes + pair.b.nbytes for adapter in adapters for pair in adapter.products.values())
