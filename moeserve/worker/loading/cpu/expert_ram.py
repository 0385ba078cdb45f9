"""Decides how many experts of a CPU model stay on disk, and starts the threads that read them."""

from __future__ import annotations

import logging
from typing import NamedTuple

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.disk_experts import Reading
from moeserve.kv.layout import KvLayout
from moeserve.models.blocks.cpu.disk_experts import CpuDiskExperts, has_experts_on_disk
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_weights import CpuWeights
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import expert_tensors
from moeserve.placement.expert_cache.policy import DECAY
from moeserve.placement.expert_pins import Pinned, pinned_experts
from moeserve.placement.expert_ram import (
    PIECE_BYTES,
    READERS,
    expert_bytes,
    expert_ram_bytes,
    expert_slots,
    slot_bytes,
)
from moeserve.placement.sizes import ModelSizes
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.worker.loading.locked_slots import lock_slots

log = logging.getLogger(__name__)


class ExpertSlots(NamedTuple):
    """The experts of each layer that RAM holds."""

    counts: list[int]
    pinned: Pinned  # the experts that stay there


def plan_expert_slots(
    config: ServerConfig, source: ModelSource, shape: ModelShape, layout: KvLayout
) -> ExpertSlots | None:
    """Returns the experts of each layer that RAM holds; None if RAM holds all. Raises ConfigError if experts would be
    on disk but this model cannot be served from disk."""
    sizes = ModelSizes.of(source.tensors, layout)
    budget = expert_ram_bytes(config, sizes, layout, available_bytes())
    if budget is None:
        return None
    names = [name for index in range(shape.num_layers) for name in expert_tensors(shape, index)]
    if not names:
        if config.expert_ram is None:
            return None  # a dense model that does not fit is refused with its size
        raise ConfigError("--expert-ram: this model has no routed experts; leave it out")
    if any(source.experts_in_file(name) is None for name in names):
        raise ConfigError(
            "experts can be read from disk only from a GGUF file that contains the weights: free memory for all "
            f"experts ({expert_bytes(sizes) / GIB:.1f} GiB), or convert the folder to GGUF"
        )
    pinned = pinned_experts(config, sizes)
    slots = expert_slots(sizes, shape, budget, pinned)
    log.info(
        "RAM holds %.2f of %.2f GiB of routed experts%s; the others are read from disk when a text uses them",
        *(slot_bytes(sizes, slots) / GIB, expert_bytes(sizes) / GIB, limit_note()),
    )
    if count := sum(map(len, pinned)):
        log.info("%d experts stay in RAM, by --placement-rules", count)
    return ExpertSlots(slots, pinned)


def open_disk(
    weights: CpuWeights, stream: CpuStream, shape: ModelShape, pinned: Pinned | None
) -> CpuDiskExperts | None:
    """Allocates the slots' memory and locks it where that is allowed, starts the reading threads and reads the pinned
    experts. Returns None if all experts are in RAM. Raises ModelError if a file cannot be opened or read, or was
    replaced since the model was loaded."""
    if not has_experts_on_disk(weights.layers):
        return None
    disk = CpuDiskExperts(stream, shape, weights.layers, Reading(READERS, PIECE_BYTES, DECAY), pinned)
    lock_slots(disk.slots)
    return disk
