"""Which of a model's experts RAM holds if not all fit, and how much each token then reads from disk."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moeserve.cli.plan.cache_forecast import CacheForecast, CacheUse
from moeserve.cli.plan.disk_rate import DiskRate
from moeserve.cli.plan.report import Speed
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import expert_tensors
from moeserve.placement import Placement
from moeserve.placement.disk_tier import ram_expert_counts, ram_pins
from moeserve.placement.expert_pins import Pinned, pinned_experts
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


@dataclass(frozen=True, slots=True)
class DiskFit:
    weight_bytes: int  # all weights in RAM
    slot_bytes: int  # the experts among them
    expert_bytes: int  # bytes of all experts
    token_bytes: int  # bytes of the experts that one token uses
    slots: list[int]  # of each layer
    pinned: Pinned  # experts that stay in RAM

    def caution(self, disk_rate: DiskRate) -> str:
        wait = self.token_bytes / disk_rate.bytes_per_s
        return (
            f"RAM holds {self.slot_bytes / GIB:.2f} of {self.expert_bytes / GIB:.2f} GiB of experts. A token uses "
            f"{self.token_bytes / GIB:.3f} GiB of them, which take {wait:.2g} s to read if none is in RAM, at "
            f"{disk_rate.bytes_per_s / 1e9:.2g} GB/s ({disk_rate.origin})"
        )

    def slowed(
        self,
        speed: Speed,
        forecast: CacheForecast,
        disk_rate: DiskRate,
        step_tokens: int,
        *,
        has_gpu: bool = False,
    ) -> Speed:
        """Returns the speed with reads from disk. Steps with prompts, and steps of more streams than were forecast, use
        all experts, so each of them reads all experts that are not in RAM. has_gpu: the hit rates in `speed` are a
        GPU's; they stay."""
        rest = float(self.expert_bytes - self.slot_bytes)

        def decode(rates: dict[int, float], uses: dict[int, CacheUse]) -> dict[int, float]:
            return {
                count: count / (count / rate + (uses[count].missed_bytes if count in uses else rest) / per_s)
                for count, rate in rates.items()
            }

        per_s = disk_rate.bytes_per_s
        settled, at_first = forecast.settled, forecast.at_first
        slowed = dataclasses.replace(
            speed,
            # A chunk's experts are read while those before them are computed.
            prefill={
                tokens: tokens / max(tokens / rate, -(-tokens // step_tokens) * rest / per_s)
                for tokens, rate in speed.prefill.items()
            },
            decode=decode(speed.decode, settled),
            decode_at_first=decode(
                {count: speed.decode_at_first.get(count, speed.decode[count]) for count in at_first}, at_first
            ),
        )
        if has_gpu:
            return slowed
        return dataclasses.replace(
            slowed,
            hit_rates={count: use.hit_rate for count, use in settled.items()},
            hit_rates_at_first={count: use.hit_rate for count, use in at_first.items()},
        )

    def gpu_caution(self, forecast: CacheForecast) -> str:
        """Returns a caution that says how many of the experts that the GPU misses are in RAM."""
        rates = [f"{use.hit_rate:.0%} ({count})" for count, use in sorted(forecast.settled.items())]
        return f"of the experts that the GPU misses RAM holds, by streams: {', '.join(rates)}"


def fit_beneath_gpu(model: ModelShape, sizes: ModelSizes, placement: Placement) -> DiskFit | None:
    """Returns which of the experts that are not on the GPU are in RAM; None if all of them are."""
    if placement.ram_slots is None:
        return None
    slots = list(placement.ram_slots)
    return DiskFit(
        placement.cpu_weight_bytes,
        slot_bytes(sizes, slots),
        slot_bytes(sizes, ram_expert_counts(placement)),
        slot_bytes(sizes, least_slots(model)),
        slots,
        ram_pins(placement),
    )


def fit_disk(
    config: ServerConfig,
    source: ModelSource,
    model: ModelShape,
    sizes: ModelSizes,
    layout: KvLayout,
    free: int,
) -> DiskFit | None:
    """Returns which experts `free` bytes of RAM hold; None if they hold all, or if the model's experts cannot stay on
    disk. Raises ConfigError if they do not hold the experts of one token, or if --expert-ram or a placement rule asks
    for what is impossible."""
    names = [name for index in range(model.num_layers) for name in expert_tensors(model, index)]
    if not names or any(source.experts_in_file(name) is None for name in names):
        if config.expert_ram is not None:
            raise ConfigError("--expert-ram needs a GGUF file with routed experts; leave it out")
        return None
    budget = expert_ram_bytes(config, sizes, layout, free)
    if budget is None:
        return None
    pinned = pinned_experts(config, sizes)
    slots = expert_slots(sizes, model, budget, pinned)
    in_ram = slot_bytes(sizes, slots)
    weights = dense_bytes(sizes) + in_ram + READER_BYTES
    return DiskFit(weights, in_ram, expert_bytes(sizes), slot_bytes(sizes, least_slots(model)), slots, pinned)
