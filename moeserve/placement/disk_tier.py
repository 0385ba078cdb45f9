"""Places a model on a GPU, in RAM and on disk, if RAM cannot hold all experts that are not on the GPU."""

from __future__ import annotations

from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.models.interface import ModelShape
from moeserve.placement.expert_pins import Pinned
from moeserve.placement.expert_ram import (
    MARGIN_BYTES,
    MARGIN_SHARE,
    READER_BYTES,
    expert_slots,
    slot_bytes,
)
from moeserve.placement.gpu import Gpu
from moeserve.placement.options import with_expert_cache
from moeserve.placement.place import PlacementOptions, place
from moeserve.placement.placement import Placement
from moeserve.placement.sizes import ModelSizes


def place_in_tiers(
    config: ServerConfig,
    sizes: ModelSizes,
    shape: ModelShape,
    options: PlacementOptions,
    gpu: Gpu,
    ram: int,
    *,
    in_file: bool,
) -> Placement:
    """Returns the placement on the GPU and in `ram` bytes of RAM. Experts that fit into neither, or exceed
    --expert-ram, stay on disk; then no experts are streamed to the GPU, because a stream reads all of them from RAM.
    in_file: whether a file contains the experts in the form in which they are computed. Raises ConfigError if
    --expert-ram cannot be met."""
    placement = with_expert_cache(place(sizes, options, gpu), sizes, config, ram)
    wanted = config.expert_ram
    if not placement.shares_layers or (wanted is None and placement.cpu_weight_bytes <= ram):
        return placement
    obstacle = _obstacle(placement, in_file=in_file)
    if obstacle is not None:
        if wanted is None:
            return placement
        raise ConfigError(f"--expert-ram: {obstacle}; leave it out")
    below = place(sizes, options, replace(gpu, can_stream=False))
    if config.expert_cache != "off":
        below = below.with_cache(sizes)
    counts = ram_expert_counts(below)
    everything = slot_bytes(sizes, counts)
    dense = below.cpu_weight_bytes - everything
    left = max(0, ram - dense)
    budget = int(
        wanted * GIB if wanted is not None else (1 - MARGIN_SHARE) * left - MARGIN_BYTES - READER_BYTES
    )
    if budget >= everything:
        return placement
    slots = expert_slots(sizes, shape, budget, ram_pins(below), counts)
    in_ram = dense + slot_bytes(sizes, slots) + READER_BYTES
    return replace(below, ram_slots=tuple(slots), cpu_weight_bytes=in_ram)


def ram_expert_counts(placement: Placement) -> list[int]:
    """Returns how many of each layer's experts are not on the GPU alone."""
    return [len(placement.cpu_experts(index)) for index in range(len(placement.layers))]


def ram_pins(placement: Placement) -> Pinned:
    """Returns each layer's experts that rules keep in RAM."""
    return [layer.fixed.difference(layer.gpu_experts) for layer in placement.layers]


def _obstacle(placement: Placement, *, in_file: bool) -> str | None:
    if not in_file:
        return "experts can be read from disk only from a GGUF file that contains the weights"
    if placement.layers_in_ram:
        return "where the CPU computes the first layers, their experts cannot be on disk"
    return None
