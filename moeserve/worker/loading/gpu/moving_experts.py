"""Moves experts from RAM to the GPU: streaming for prompts, and the expert cache."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.interface import ModelShape
from moeserve.models.loading.expert_maps import ExpertMaps
from moeserve.models.loading.expert_slots import ExpertSlots
from moeserve.models.loading.expert_stream import ExpertStream
from moeserve.models.loading.gpu_weights import GpuWeights
from moeserve.models.loading.pinned_panels import PinnedPanels
from moeserve.models.loading.ram_experts import RamExperts
from moeserve.placement import Placement
from moeserve.placement.expert_cache.fetching import AT_ONCE, rows_that_fetch, share_without_slot
from moeserve.placement.expert_cache.policy import DECAY, STEP_BYTES, UNSTREAMED_STEP_BYTES
from moeserve.worker.engines.gpu.disk_promotions import DiskPromotions
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MovingExperts:
    experts: RamExperts | None  # None: all are on the GPU
    panels: PinnedPanels | None  # None: experts do not move
    maps: ExpertMaps | None  # None: every expert is in one memory only
    stream: ExpertStream | None

    @classmethod
    def of(
        cls,
        weights: GpuWeights,
        experts: RamExperts | None,
        placement: Placement,
        shape: ModelShape,
        device: torch.device,
    ) -> MovingExperts:
        """Returns what moves experts between RAM and the GPU, prepared before the model is built, so that `weights` and
        `experts` share their expert maps. Raises ConfigError if a placement rule requires streaming and it is
        impossible."""
        if experts is None:
            return cls(None, None, None, None)
        maps = ExpertMaps(weights, experts, shape.num_experts, device) if placement.has_cache else None
        panels = pinned_panels(experts, placement, device)
        stream = None
        if panels is not None and placement.stream_bytes:
            stream = ExpertStream(experts.layers, panels, device, maps)
        return cls(experts, panels, maps, stream)

    def cache(
        self, weights: GpuWeights, placement: Placement, model: GpuDecoder, has_drafts: bool
    ) -> ExpertCache | None:
        """Returns the expert cache, which exchanges experts between RAM and the GPU; None if no experts move.
        has_drafts: whether steps may have drafts."""
        if self.maps is None or self.panels is None or self.experts is None:
            return None
        movable = np.zeros_like(self.maps.on_gpu)
        for own, layer in zip(movable, placement.gpu_layers, strict=True):
            if layer.is_cached:
                own[[e for e in range(layer.num_experts) if e not in layer.fixed]] = True
        slots = [
            None if of.moe is None or not layer.is_cached else of.moe.experts
            for of, layer in zip(weights.layers, placement.gpu_layers, strict=True)
        ]
        staging = _staging(self.stream, model.device)
        moved = ExpertSlots(slots, self.experts.layers, self.panels, staging, self.maps.slots)
        if not moved.most:
            return None
        disk = None
        if self.experts.disk is not None:
            disk = DiskPromotions(self.experts.disk, self.experts, self.maps.places)
        fetch = None
        if disk is None:
            in_ram = share_without_slot(movable, self.maps.on_gpu)
            if rows := rows_that_fetch(model.shape.top_k, in_ram, has_drafts=has_drafts):
                places = np.where(movable, self.maps.places, np.int32(-1))
                fetch = moved.fetch(places, DECAY, rows, AT_ONCE)
                model.fetch_missed(fetch)
        return ExpertCache(
            self.maps, moved, movable, model.expert_token_counts, model.pool_reads, disk, fetch
        )


def _staging(stream: ExpertStream | None, device: torch.device) -> Tensor:
    """Returns the staging buffer, uint8, of experts being copied to the GPU; it is part of the streaming buffers if
    prompts are streamed."""
    if stream is None:
        return torch.empty(UNSTREAMED_STEP_BYTES, dtype=torch.uint8, device=device)
    return stream.idle_buffer[:STEP_BYTES]


def pinned_panels(experts: RamExperts, placement: Placement, device: torch.device) -> PinnedPanels | None:
    """Returns the experts in RAM as pinned memory, from which a GPU can copy in the background. Returns None if experts
    are neither streamed nor cached. If the memory cannot be pinned, logs a warning and returns None, or raises
    ConfigError if a placement rule requires streaming."""
    if not placement.stream_bytes and not placement.has_cache:
        return None
    try:
        return PinnedPanels(experts.layers, device)
    except RuntimeError as error:
        with suppress(RuntimeError):  # CUDA reports the error again at the next launch
            torch.zeros(1, device=device)
        _cannot_move(placement, f"their memory cannot be pinned ({error})")
        return None


def _cannot_move(placement: Placement, obstacle: str) -> None:
    """Logs that experts cannot move. Raises ConfigError if a placement rule requires streaming."""
    if placement.streaming_rule is not None:
        raise ConfigError(
            f"--placement-rules: {placement.streaming_rule} is impossible: experts are not streamed to the GPU, "
            f"because {obstacle}; leave `prefill` out, or free some RAM"
        )
    log.warning(
        "experts in RAM stay there: there is no expert cache, and the CPU computes them for prompts too: %s; "
        "leave more RAM free, or choose a smaller model or quantisation (under WSL, Windows lets a program pin about "
        "half of the machine's memory)",
        obstacle,
    )
