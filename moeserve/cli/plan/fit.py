"""Computes where each part of a model is placed on a machine, and how much memory it takes: computed from headers and
sizes, nothing is measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from moeserve.cli.plan.disk_fit import DiskFit, fit_beneath_gpu, fit_disk
from moeserve.cli.plan.memory import (
    Memory,
    predict,
    processes_bytes,
    usable_gpu_bytes,
)
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.cli.plan.tower import tower_memory
from moeserve.config import ServerConfig, drafts_of
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import layout_of
from moeserve.models.gpu_features import gpu_drafting_shape, gpu_shape
from moeserve.models.interface import ModelShape
from moeserve.models.next_token import drafting_shape
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import has_experts_in_file
from moeserve.placement import Gpu, ModelSizes, Placement, place
from moeserve.placement.disk_tier import place_in_tiers
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES, gpu_draft_record_bytes, gpu_reserved_bytes
from moeserve.placement.gpu_compressed import check_gpu_compressed
from moeserve.placement.gpu_drafts import check_drafts_placed, check_gpu_drafts
from moeserve.placement.options import (
    placement_options,
    with_state_slots,
    with_unpacked_beside_kv,
    with_window_pool,
)
from moeserve.placement.sizes import has_float_weights
from moeserve.placement.step_tokens import step_tokens
from moeserve.placement.tower_room import budget_beside_tower
from moeserve.placement.unpacked import check_unpacked
from moeserve.worker.adapters.memory import (
    AdapterMemory,
    adapter_memory,
    open_adapters,
    plan_gpu_adapters,
)
from moeserve.worker.loading.draft_model import open_draft_model

GPU_FLOAT_BYTES = 2  # bytes per number that tensor cores multiply
LEAST_KV_TOKENS = 64


@dataclass(frozen=True)
class Fit:
    source: ModelSource
    model: ModelShape
    sizes: ModelSizes
    routing: RoutingProbabilities
    placement: Placement
    memory: Memory
    step_tokens: int
    disk: DiskFit | None = None  # None: all experts are in memory


def fit_model(config: ServerConfig, gpu: int | None, ram: int, note: str = "") -> Fit:
    """Returns how a model fits into the memory: where its parts are placed, and how many bytes they take. gpu: bytes of
    the GPU's memory; None: CPU only. ram: bytes that the server may take; note: what limits these bytes, for messages.
    Raises UserError for a file or an option that cannot be served, or a model that does not fit."""
    tower = tower_memory(config, gpu)
    if gpu is not None:
        gpu -= tower.gpu
        config = budget_beside_tower(config, tower.gpu)
    source = open_metadata(Path(config.model))
    drafts = drafts_of(config)
    model = read_checked_shape(source)
    if gpu is not None:
        model = gpu_shape(model, config.max_model_len)
    if drafts is not None:
        model = drafting_shape(model, source, drafts.block_method)
    if gpu is not None:
        model = gpu_drafting_shape(model, None if drafts is None else drafts.block_method)
        check_gpu_drafts(config, model)
        check_gpu_compressed(config, model)
    small = open_draft_model(config, source, model, has_tensors=False, on_gpu=gpu is not None)
    layout = layout_of(config, model, None if small is None else small.layout)
    sizes = ModelSizes.of(source.tensors, layout)
    if gpu is not None:
        sizes = sizes.with_kv_beside(layout.beside_bytes)
        sizes = sizes.with_draft_records(gpu_draft_record_bytes(config, model))
    gpu_adapters = None if gpu is None else plan_gpu_adapters(config, model, GPU_FLOAT_BYTES)
    options = placement_options(config, model)
    usable = None if gpu is None else usable_gpu_bytes(config, gpu)
    in_a_step = step_tokens(config.max_num_batched_tokens, model, usable)
    most_rows = max(in_a_step, config.max_num_seqs)
    reserved = 0
    if usable is not None:
        check_unpacked(config, in_a_step)
        reserved = gpu_reserved_bytes(
            config,
            model,
            most_rows,
            sizes,
            usable,
            float_weights=has_float_weights(source.tensors, model),
            adapter_rank=0 if gpu_adapters is None else gpu_adapters.rank,
        )
        reserved += 0 if small is None else small.gpu_bytes(config, model, most_rows)
    adapter_bytes = 0 if gpu_adapters is None else gpu_adapters.num_bytes
    room = None if gpu is None else Gpu(gpu - CUDA_CONTEXT_BYTES, reserved + adapter_bytes)
    routing = RoutingProbabilities(model, options.counts)
    if gpu is None:
        options = dataclasses.replace(options, counts=None)  # heat then predicts reads, it places nothing
    if room is not None:
        options = with_window_pool(options, config, layout, most_rows)
        options = with_state_slots(options, config, sizes, room)
        options = with_unpacked_beside_kv(options, config, model, most_rows)
    # On the CPU engine, rules say which experts stay in RAM while others are on disk.
    first = dataclasses.replace(options, rules=None) if gpu is None else options
    placement = place(sizes, first, room)
    if room is None:
        disk = None
    else:
        free = ram - processes_bytes(config, model, placement, in_a_step)
        in_file = has_experts_in_file(source, model)
        placement = place_in_tiers(config, sizes, model, options, room, free, in_file=in_file)
        check_drafts_placed(
            model,
            placement,
            () if small is None else small.taps,
            has_small_model=small is not None and small.head is None,
        )
        disk = fit_beneath_gpu(model, sizes, placement)
    if gpu is None:
        free = ram - processes_bytes(config, model, placement, in_a_step)
        free -= (
            0 if small is None else small.weight_bytes + small.buffer_bytes(most_rows, config.max_num_seqs)
        )
        disk = fit_disk(config, source, model, sizes, layout, free)
        if disk is None:
            place(sizes, options, room)  # refuses rules
    if disk is not None and gpu is None:
        placement = dataclasses.replace(placement, cpu_weight_bytes=disk.weight_bytes)
        in_a_step = step_tokens(config.max_num_batched_tokens, model, None, disk.slot_bytes)
        most_rows = max(in_a_step, config.max_num_seqs)
    gpu_other = 0
    if gpu is not None:
        gpu_other = reserved + CUDA_CONTEXT_BYTES + sizes.record_bytes(placement.layers_in_ram)
    adapters = AdapterMemory()
    if gpu is None:
        adapters = adapter_memory(config, model, open_adapters(config, model), most_rows)
    memory = predict(
        *(config, layout, sizes, placement, ram, gpu_other, in_a_step, adapters, tower),
        gpu_adapters=adapter_bytes,
        draft_model=small,
    )
    _check_ram(memory, ram, note)
    return Fit(source, model, sizes, routing, placement, memory, in_a_step, disk)


def _check_ram(memory: Memory, ram: int, note: str) -> None:
    if memory.ram_start > ram:
        raise ConfigError(
            f"{memory.ram_start / GIB:.2f} GiB of RAM are needed and {ram / GIB:.2f} GiB are there{note}: put more "
            "experts on a GPU, or choose a smaller model or quantisation"
        )
    if memory.kv_tokens < LEAST_KV_TOKENS:
        raise ConfigError(
            f"there is room for only {memory.kv_tokens} tokens of KV: free some memory, or choose a "
            "smaller model"
        )
