"""The plan of a GPU engine, made before anything is loaded: its share of the model, the size of its steps, and the
place of each weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeserve.config import ServerConfig, drafts_of
from moeserve.errors import ConfigError
from moeserve.kv.disk.directory import DiskDirectory
from moeserve.kv.layout import KvLayout, check_cpu_reads, layout_of
from moeserve.models.gpu_features import (
    check_gpu_features,
    gpu_drafting_shape,
    gpu_shape,
)
from moeserve.models.interface import ModelShape
from moeserve.models.loading.engine_types import check_cpu_types, check_gpu_types
from moeserve.models.loading.gpu_orders import check_gpu_orders
from moeserve.models.loading.lanes import check_lanes
from moeserve.models.next_token import drafting_shape
from moeserve.models.ranks.rank_share import RankShare
from moeserve.models.ranks.rank_source import RankSource
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import id_tensors, unloaded_tensors
from moeserve.placement import Placement
from moeserve.placement.gpu_compressed import check_gpu_compressed
from moeserve.placement.gpu_drafts import check_drafts_placed, check_gpu_drafts
from moeserve.placement.group import share_among
from moeserve.placement.options import heat_counts
from moeserve.placement.unpacked import check_unpacked
from moeserve.worker.adapters.memory import GpuAdapterPlan, plan_gpu_adapters, refuse_adapters
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.group.shares import Connections, connect
from moeserve.worker.loading.draft_model import DraftModel, open_draft_model
from moeserve.worker.loading.drafting import refuse_records_of_drafts
from moeserve.worker.loading.gpu.device_memory import check_kv_numbers, plan_placement, step_tokens_on
from moeserve.worker.loading.ready import log_skipped
from moeserve.worker.recording.step_recorder import StepRecorder, open_recorder
from moeserve.worker.tiers.storage import claim_directory, refuse_tiers


@dataclass(frozen=True, slots=True)
class GpuLoadPlan:
    source: ModelSource  # this process's share
    shape: ModelShape  # of this process's share
    whole: ModelShape
    share: RankShare | None  # None: this GPU has the whole model
    layout: KvLayout
    step_tokens: int  # tokens of prompts and answers per step
    max_tokens: int  # largest number of rows of a step
    placement: Placement
    connections: Connections
    heat: Sequence[Sequence[int]] | None  # [layers][experts] of the whole model, from --expert-heat
    adapters: GpuAdapterPlan | None
    recorder: StepRecorder | None
    directory: DiskDirectory | None  # of the disk tier
    draft_model: DraftModel | None  # the small model or the EAGLE-3 head that drafts; None: there is none


def plan_load(
    config: ServerConfig, source: ModelSource, device: torch.device, ranks: RankGroup | None
) -> GpuLoadPlan:
    """Returns the plan by which the model is loaded: its shape, placement and sizes; loads no weights, but claims the
    disk tier's folder, opens the recorder and connects the ranks. source: the whole model. ranks: the group that shares
    it and agrees on the plan; None: this GPU has all of it. Raises ModelError for a bad file, ConfigError for an
    impossible configuration, AdapterError."""
    if config.weight_layout == "file":
        raise ConfigError("--weight-layout file is for the CPU alone; leave it out, or choose --device cpu")
    if ranks is not None:
        if config.expert_ram is not None:
            raise ConfigError("--expert-ram: with several GPUs no expert can be on disk; leave it out")
        refuse_tiers(config, "with several GPUs")
        refuse_adapters(config)
    directory = claim_directory(config)
    shape, drafts = gpu_shape(read_checked_shape(source), config.max_model_len), drafts_of(config)
    if drafts is not None:
        shape = gpu_drafting_shape(drafting_shape(shape, source, drafts.block_method), drafts.block_method)
    whole = shape
    # an adapter that does not fit the model ends the start now
    adapters = plan_gpu_adapters(config, shape, 2 if device.type == "cuda" else 4)
    log_skipped(shape, source, config)
    check_lanes(source, shape, "GPU")
    unloaded = unloaded_tensors(shape)  # the host reads their rows
    check_cpu_types(source, unloaded)
    check_gpu_types(source, source.tensors.keys() - unloaded - id_tensors(shape))
    check_gpu_orders(source, is_shared=ranks is not None)
    check_gpu_features(source, shape)
    refuse_records_of_drafts(config)
    check_gpu_drafts(config, shape)
    small = open_draft_model(config, source, shape, on_gpu=True)
    check_gpu_compressed(config, shape)
    share, heat = None, heat_counts(config, shape)
    if ranks is not None:
        share = share_among(config, shape, source.tensors, ranks.rank, ranks.num_ranks, heat)
        source, shape = RankSource(source, share), share.shape
        ranks.barrier()
    layout = layout_of(config, shape, None if small is None else small.layout)
    check_kv_numbers(layout, device)
    step_tokens = step_tokens_on(device, config, shape)
    if ranks is not None:
        step_tokens = ranks.least(step_tokens)
    check_unpacked(config, step_tokens)
    max_tokens = max(step_tokens, config.max_num_seqs)
    recorder = open_recorder(config, shape, max_tokens)
    connections = Connections()
    if ranks is not None and share is not None:
        connections = connect(share, ranks, max_tokens, is_observed=recorder is not None)
    placement = plan_placement(config, layout, source, max_tokens, device, share, adapters, heat, small)
    check_drafts_placed(
        shape,
        placement,
        () if small is None else small.taps,
        has_small_model=small is not None and small.head is None,
    )
    if placement.layers_in_ram:
        check_cpu_reads(layout)
        refuse_tiers(config, "where the first layers are the CPU's")
    return GpuLoadPlan(
        source, shape, whole, share, layout, step_tokens, max_tokens, placement, connections, heat, adapters,
        recorder, directory, small,
    )  # fmt: skip
