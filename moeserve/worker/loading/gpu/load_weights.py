"""Loads a GPU engine's weights: in GPU memory, in RAM, and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeserve.config import ServerConfig
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.disk_experts import Reading
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.loading.cpu_weights import CpuWeights
from moeserve.models.loading.disk_slots import RamSlots
from moeserve.models.loading.gpu_draft_head import GpuDraftHead, GpuDraftHeadLoader
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.loading.gpu_weights import GpuWeights, float_type
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.models.loading.progress import OnProgress
from moeserve.models.loading.ram_experts import RamExperts, load_ram_experts
from moeserve.models.loading.unpacked_experts import with_unpacked_experts
from moeserve.placement.disk_tier import ram_pins
from moeserve.placement.expert_cache.policy import DECAY
from moeserve.placement.expert_ram import PIECE_BYTES, READERS
from moeserve.worker.adapters.gpu import LoadedAdapters, load_gpu_adapters
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.group.shares import gpu_experts
from moeserve.worker.loading.cpu.huge_pages import use_huge_pages
from moeserve.worker.loading.cpu.pool_start import check_ram, choose_products, open_stream
from moeserve.worker.loading.gpu.load_plan import GpuLoadPlan
from moeserve.worker.loading.gpu.ram_expert_order import ram_expert_order
from moeserve.worker.loading.gpu.rank_pool import open_rank_stream
from moeserve.worker.loading.gpu.small_model import load_small_model
from moeserve.worker.loading.locked_slots import lock_slots


@dataclass(frozen=True, slots=True)
class InRam:
    """The weights that stay in RAM, used by the pool."""

    stream: CpuStream
    cpu_stage: CpuWeights | None  # None: the first layer is on the GPU
    experts: RamExperts | None  # None: all experts of the GPU's layers are on the GPU


def _in_ram(
    config: ServerConfig,
    plan: GpuLoadPlan,
    device: torch.device,
    on_progress: OnProgress,
    ids: Sequence[Sequence[int]],
    ram_bytes: int,
    ranks: RankGroup | None,
) -> InRam | None:
    """Loads the RAM weights. ids: RAM experts of each layer on the GPU. ram_bytes: of all ranks together."""
    source, shape, placement = plan.source, plan.shape, plan.placement
    if not placement.begins_in_ram and not placement.shares_layers:
        return None
    check_ram(ram_bytes)
    stream = open_stream(config) if ranks is None else open_rank_stream(config, ranks)
    count = placement.layers_in_ram
    first = None
    if placement.begins_in_ram:
        first = CpuLoader(stream, source, shape, on_progress).load_first(count)
    experts = None
    if placement.shares_layers:
        slots = None
        if placement.ram_slots is not None:
            reading = Reading(READERS, PIECE_BYTES, DECAY)
            slots = RamSlots(placement.ram_slots, ram_pins(placement), reading)
        experts = load_ram_experts(
            stream, source, shape, ids, device, on_progress, first_layer=count, slots=slots
        )
        if experts.disk is not None:
            lock_slots(experts.slots)
    use_huge_pages()
    choose_products(stream, config, source)
    return InRam(stream, first, experts)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights that this process has loaded."""

    on_gpu: GpuWeights
    in_ram: InRam | None
    # RAM experts of each layer on the GPU, in storage order.
    ram_ids: Sequence[Sequence[int]]
    adapters: LoadedAdapters | None
    draft_head: GpuDraftHead | None
    draft_model: GpuWeights | None  # of the small model that drafts
    nbytes: int  # of all processes together

    @property
    def table(self) -> NgramRows | None:
        """The table of n-gram embeddings, whose layer is on the GPU or in RAM; None: the model has none."""
        in_ram = None if self.in_ram is None else self.in_ram.cpu_stage
        of_stage = None if in_ram is None else in_ram.ngrams
        here = [of_stage, *(layer.ngrams for layer in self.on_gpu.layers)]
        return next((ngrams.table for ngrams in here if ngrams is not None), None)


def load_weights(
    config: ServerConfig,
    plan: GpuLoadPlan,
    on_progress: OnProgress,
    device: torch.device,
    ranks: RankGroup | None,
) -> LoadedWeights:
    placement = plan.placement
    has_ends = plan.connections.stage is None or plan.connections.stage.is_first
    drafts = plan.shape.next_token_layer is not None  # the block reads the embedding
    on_gpu = GpuLoader(plan.source, plan.shape, device, on_progress).load(
        gpu_experts(placement, plan.share),
        placement.layers_in_ram,
        with_embedding=has_ends and (drafts or not placement.begins_in_ram),
        with_head=has_ends,
    )
    floats = float_type(on_gpu, device)
    on_gpu = with_unpacked_experts(on_gpu, placement.unpacked_layers, floats, first=placement.layers_in_ram)
    ram_bytes, nbytes = placement.cpu_weight_bytes, placement.gpu_weight_bytes + placement.cpu_weight_bytes
    if ranks is not None:
        ram_bytes, nbytes = ranks.total(ram_bytes), ranks.total(nbytes)
    ram_ids = ram_expert_order(config, placement, plan.share, plan.heat)
    in_ram = _in_ram(config, plan, device, on_progress, ram_ids, ram_bytes, ranks)
    head, small_weights, small = None, None, plan.draft_model
    if small is not None and small.head is not None:
        head = GpuDraftHeadLoader(small.source, small.head, device, on_progress).load_head(plan.shape)
        nbytes += small.weight_bytes
    elif small is not None:
        small_weights = load_small_model(small, device, on_progress)
        nbytes += small.weight_bytes
    adapters = load_gpu_adapters(config, plan.adapters, plan.shape, placement, floats, device)
    _empty_cache(device)
    return LoadedWeights(on_gpu, in_ram, ram_ids, adapters, head, small_weights, nbytes)


def _empty_cache(device: torch.device) -> None:
    """Frees the memory left over from unpacking, before the device's free memory is measured."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
