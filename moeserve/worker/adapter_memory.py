"""The LoRA adapters of the flags by their headers, and the RAM that they take.

It needs no torch: `moeserve plan` counts with it what the worker takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeserve.adapters.modules import DEFAULT_MEMORY_GIB, parse_modules
from moeserve.adapters.open import open_adapter
from moeserve.adapters.read_gguf import GgufAdapter
from moeserve.adapters.read_peft import PeftAdapter
from moeserve.adapters.sizes import panel_bytes, workspace_bytes
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.interface import ModelShape
from moeserve.units import GIB


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Bytes of RAM, on the CPU engine."""

    as_read: int  # until the engine is built
    resident: int  # as the kernels read them, and what a step has between the two matrices
    later: int  # kept free for those of --lora-dir

    @property
    def reserved(self) -> int:
        """What the KV pool leaves for adapters."""
        return self.as_read + self.resident + self.later


def open_adapters(config: ServerConfig, shape: ModelShape) -> list[PeftAdapter | GgufAdapter]:
    """By their headers alone. Raises AdapterError for one that does not fit the model."""
    return [
        open_adapter(name, Path(path), shape) for name, path in parse_modules(config.lora_modules).items()
    ]


def adapter_memory(
    config: ServerConfig, shape: ModelShape, checked: Sequence[PeftAdapter | GgufAdapter], tokens: int
) -> AdapterMemory:
    """tokens: of the largest step."""
    sizes = [size for adapter in checked for size in adapter.sizes]
    resident = panel_bytes(sizes) + workspace_bytes(
        shape, tokens, max((size.rank for size in sizes), default=0)
    )
    return AdapterMemory(sum(adapter.nbytes for adapter in checked), resident, later_bytes(config))


def later_bytes(config: ServerConfig) -> int:
    """RAM that is kept free for adapters that are loaded while the server runs."""
    if config.lora_dir is None:
        return 0
    return int((DEFAULT_MEMORY_GIB if config.lora_memory is None else config.lora_memory) * GIB)


def refuse_adapters(config: ServerConfig) -> None:
    """On a GPU. Raises ConfigError."""
    if config.lora_modules:
        raise ConfigError("--lora-modules is for the CPU engine alone; leave it out, or choose --device cpu")
    if config.lora_dir is not None:
        raise ConfigError("--lora-dir is for the CPU engine alone; leave it out, or choose --device cpu")
