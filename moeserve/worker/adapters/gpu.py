"""Loads the LoRA adapters of a GPU engine at start-up: checks them against the placement, reads and uploads them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeserve.config import ServerConfig
from moeserve.config.units import GIB, MIB
from moeserve.errors import ConfigError
from moeserve.models.adapters.products import products_of
from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.adapters.scope import AdapterScope, scope_of
from moeserve.models.blocks.gpu.lora import GpuAdapterMatrices, GpuAdapters
from moeserve.models.interface import ModelShape
from moeserve.placement import Placement
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.worker.adapters.memory import GpuAdapterPlan, later_bytes
from moeserve.worker.adapters.resident import AdapterAtStart, ResidentAdapters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    slots: GpuAdapters
    resident: ResidentAdapters[GpuAdapterMatrices]
    at_start: list[AdapterAtStart]


def load_gpu_adapters(
    config: ServerConfig,
    plan: GpuAdapterPlan | None,
    shape: ModelShape,
    placement: Placement,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedAdapters | None:
    """Returns the loaded adapters; None if the configuration allows none. dtype: of the operands of the tensor
    cores. Raises ConfigError if adapters are impossible with this placement or memory, AdapterError for a bad
    adapter."""
    if plan is None:
        return None
    if placement.layers_in_ram:
        raise ConfigError(
            f"--lora-modules, --lora-dir: the first {placement.layers_in_ram} layers are in RAM, and adapters need all "
            "of them on the GPU; leave it out, or choose --device cpu"
        )
    scopes = scopes_to_capture(config, plan.checked, shape, experts_in_ram=placement.shares_layers)
    slots = GpuAdapters(
        shape,
        plan.capacity,
        plan.rank,
        dtype,
        device,
        scopes,
        experts_in_ram=placement.shares_layers,
    )
    for checked in plan.checked:
        slots.check(checked)
    at_start = [_load(slots, number, checked) for number, checked in enumerate(plan.checked)]
    resident = ResidentAdapters(slots, at_start, later_bytes(config), config.lora_dir)
    return LoadedAdapters(slots, resident, at_start)


def scopes_to_capture(
    config: ServerConfig,
    checked: Sequence[PeftAdapter | GgufAdapter],
    shape: ModelShape,
    *,
    experts_in_ram: bool,
) -> list[AdapterScope]:
    """Returns the adapter scopes that CUDA graphs are captured for, besides NONE: attention only, because most adapters
    change nothing else; and the union of all scopes of --lora-modules, or, if adapters can be added later, the largest
    scope."""
    together = AdapterScope.NONE
    for adapter in checked:
        together |= adapter.scope
    found = {together}
    if any(adapter.scope == AdapterScope.ATTENTION for adapter in checked):
        found.add(AdapterScope.ATTENTION)
    if config.lora_dir is not None:
        can_be = scope_of({part for layer in range(shape.num_layers) for part in products_of(shape, layer)})
        if experts_in_ram:
            can_be &= ~AdapterScope.ROUTED_EXPERTS
        found |= {can_be, can_be & AdapterScope.ATTENTION}
    return sorted(found - {AdapterScope.NONE}, key=int.bit_count)


def _load(slots: GpuAdapters, number: int, checked: PeftAdapter | GgufAdapter) -> AdapterAtStart:
    wanted, free = 2 * checked.nbytes, available_bytes()  # one copy as read, one being uploaded
    if wanted > free:
        raise ConfigError(
            f"--lora-modules: reading {checked.path} takes {wanted / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory "
            f"are free{limit_note()}: free some memory, or leave it out"
        )
    adapter = checked.read()
    matrices = slots.prepare(adapter)
    slots.put(number, matrices)
    log.info(
        "adapter %s: %d products, rank up to %d, %.1f MiB of GPU memory",
        *(adapter.name, len(adapter.products), adapter.rank, matrices.num_bytes / MIB),
    )
    return AdapterAtStart(adapter.name, adapter.key, matrices.num_bytes)
