"""What of a model's experts RAM holds when not all fit, and what a token then reads from disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import expert_tensors
from moeserve.placement.expert_ram import (
    READER_BYTES,
    dense_bytes,
    expert_bytes,
    expert_ram_bytes,
    expert_slots,
    least_slots,
    slot_bytes,
)
from moeserve.placement.sizes import ModelSizes

HIT_RATES: Final = (0.8, 0.95)  # what texts find in RAM again, published for several models


@dataclass(frozen=True, slots=True)
class DiskFit:
    weight_bytes: int  # in RAM
    slot_bytes: int  # of these, experts
    expert_bytes: int  # of all experts
    token_bytes: int  # of the experts that one token uses

    def caution(self, disk_rate: float) -> str:
        """disk_rate: bytes per second."""
        few, many = ((1 - rate) * self.token_bytes / disk_rate for rate in HIT_RATES)
        low, high = HIT_RATES
        return (
            f"RAM holds {self.slot_bytes / GIB:.2f} of {self.expert_bytes / GIB:.2f} GiB of experts, and the speeds "
            f"leave out reads from disk: a token uses {self.token_bytes / GIB:.3f} GiB of experts, so that one stream "
            f"waits {many:.2g} s more for each token if {high:.0%} are in RAM, {few:.2g} s if {low:.0%} are, at "
            f"{disk_rate / 1e9:g} GB/s (--disk-bandwidth)"
        )


def fit_disk(
    config: ServerConfig,
    source: ModelSource,
    model: ModelShape,
    sizes: ModelSizes,
    layout: KvLayout,
    free: int,
) -> DiskFit | None:
    """Returns what `free` bytes of RAM hold of the experts; None if they hold all, or if no expert can be on disk.
    Raises ConfigError if they do not hold one token's."""
    names = [name for index in range(model.num_layers) for name in expert_tensors(model, index)]
    if not names or any(source.experts_in_file(name) is None for name in names):
        if config.expert_ram is not None:
            raise ConfigError("--expert-ram needs a GGUF file with routed experts; leave it out")
        return None
    budget = expert_ram_bytes(config, sizes, layout, free)
    if budget is None:
        return None
    slots = slot_bytes(sizes, expert_slots(sizes, model, budget))
    weights = dense_bytes(sizes) + slots + READER_BYTES
    return DiskFit(weights, slots, expert_bytes(sizes), slot_bytes(sizes, least_slots(model)))
