"""Opens the LoRA adapters of the flags by their headers, and computes their memory.

No torch: `moeserve plan` uses it to predict the worker's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.models.adapters.modules import DEFAULT_MEMORY_GIB, DEFAULT_MOST, GPU_RANK, parse_modules
from moeserve.models.adapters.open import open_adapter
from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.adapters.sizes import (
    gpu_matrix_bytes,
    gpu_rank,
    gpu_table_bytes,
    panel_bytes,
    workspace_bytes,
)
from moeserve.models.interface import ModelShape


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Bytes of RAM for adapters on the CPU engine; 0 with a GPU engine."""

    as_read: int = 0  # as read from the files, until the engine is built
    resident: int = 0  # in the kernels' layout, plus a step's buffer for the products of the first matrices
    later: int = 0  # kept free for adapters of --lora-dir

    @property
    def reserved(self) -> int:
        """Bytes that the KV pool must leave for adapters."""
        return self.as_read + self.resident + self.later


@dataclass(frozen=True, slots=True)
class GpuAdapterPlan:
    """The sizes of a GPU engine's adapters, before anything is loaded."""

    checked: list[PeftAdapter | GgufAdapter]  # of --lora-modules
    capacity: int  # adapters loaded at once, at most
    rank: int  # largest rank of an adapter
    num_bytes: int  # GPU memory of all adapters, without step buffers


def plan_gpu_adapters(config: ServerConfig, shape: ModelShape, float_bytes: int) -> GpuAdapterPlan | None:
    """Returns the plan of adapters on a GPU; None if the configuration allows none. float_bytes: bytes per number of
    their matrices. Raises AdapterError for an adapter that does not fit the model, ConfigError for a model whose
    adapters have no GPU kernels."""
    if not config.lora_modules and config.lora_dir is None:
        return None
    if shape.is_sandwiched:
        raise ConfigError(
            f"adapters of {shape.architecture} run on the CPU only; leave --lora-modules and --lora-dir out, or "
            "choose --device cpu"
        )
    checked = open_adapters(config, shape)
    sizes = [size for adapter in checked for size in adapter.sizes]
    capacity = len(checked) if config.lora_dir is None else config.max_loras or DEFAULT_MOST
    rank = max((size.rank for size in sizes), default=0)
    num_bytes = gpu_matrix_bytes(sizes, float_bytes) + gpu_table_bytes(shape, capacity) + later_bytes(config)
    return GpuAdapterPlan(checked, capacity, gpu_rank(max(rank, GPU_RANK)), num_bytes)


def open_adapters(config: ServerConfig, shape: ModelShape) -> list[PeftAdapter | GgufAdapter]:
    """Opens the adapters of the flags, reading only headers. Raises AdapterError for one that does not fit the
    model."""
    return [
        open_adapter(name, Path(path), shape) for name, path in parse_modules(config.lora_modules).items()
    ]


def adapter_memory(
    config: ServerConfig, shape: ModelShape, checked: Sequence[PeftAdapter | GgufAdapter], tokens: int
) -> AdapterMemory:
    """Returns the RAM that the adapters take. tokens: rows of the largest step."""
    sizes = [size for adapter in checked for size in adapter.sizes]
    resident = panel_bytes(sizes) + workspace_bytes(
        shape, tokens, max((size.rank for size in sizes), default=0)
    )
    return AdapterMemory(sum(adapter.nbytes for adapter in checked), resident, later_bytes(config))


def later_bytes(config: ServerConfig) -> int:
    """Returns the bytes kept free for adapters loaded while the server runs."""
    if config.lora_dir is None:
        return 0
    return int((DEFAULT_MEMORY_GIB if config.lora_memory is None else config.lora_memory) * GIB)


def refuse_adapters(config: ServerConfig) -> None:
    """Raises ConfigError for flags of adapters, which several GPUs do not support."""
    for flag, value in (("--lora-modules", config.lora_modules), ("--lora-dir", config.lora_dir)):
        if value:
            raise ConfigError(f"{flag}: adapters do not work with several GPUs; leave out {flag} or --gpus")
