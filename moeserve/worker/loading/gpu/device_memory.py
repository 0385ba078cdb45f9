"""Places a model on this machine's GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import psutil
import torch

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import FP8, KvLayout
from moeserve.models.interface import ModelShape
from moeserve.models.ranks.rank_share import RankShare
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import has_experts_in_file
from moeserve.placement import Gpu, ModelSizes, Placement
from moeserve.placement.disk_tier import place_in_tiers, ram_expert_counts
from moeserve.placement.engine_memory import gpu_draft_record_bytes, gpu_reserved_bytes
from moeserve.placement.expert_ram import slot_bytes
from moeserve.placement.group import place_share, share_sizes
from moeserve.placement.options import (
    placement_options,
    with_state_slots,
    with_unpacked_beside_kv,
    with_window_pool,
)
from moeserve.placement.sizes import has_float_weights
from moeserve.placement.step_tokens import step_tokens
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.worker.adapters.memory import GpuAdapterPlan
from moeserve.worker.loading.draft_model import DraftModel

log = logging.getLogger(__name__)


def free_bytes(device: torch.device) -> int:
    """Returns the device's free bytes; under Triton's interpreter the free bytes of RAM."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    return torch.cuda.mem_get_info(device)[0]


def usable_bytes(device: torch.device, config: ServerConfig) -> int:
    """Returns the bytes of the GPU's memory that the engine may use: its budget, or all free memory."""
    budget = config.gpu_memory_budget
    return free_bytes(device) if budget is None else int(budget * GIB)


def step_tokens_on(device: torch.device, config: ServerConfig, shape: ModelShape) -> int:
    """Returns the largest number of tokens of a step. Without a memory budget it does not depend on free memory,
    because a replacing worker must get the same number."""
    usable = usable_bytes(device, config)
    if config.gpu_memory_budget is None and device.type == "cuda":
        usable = torch.cuda.mem_get_info(device)[1]
    return step_tokens(config.max_num_batched_tokens, shape, usable)


def plan_placement(
    config: ServerConfig,
    layout: KvLayout,
    source: ModelSource,
    max_tokens: int,
    device: torch.device,
    share: RankShare | None = None,
    adapters: GpuAdapterPlan | None = None,
    counts: Sequence[Sequence[int]] | None = None,
    draft_head: DraftModel | None = None,
) -> Placement:
    """Returns the placement of the model. share: this GPU's, if there are several; `layout` and `source` are then
    the share's. adapters, draft_head: room is left for them. counts: with a share, [layers][experts] of the whole
    model. Raises ConfigError, with what would fit, if the placement is impossible."""
    shape = layout.shape
    sizes = ModelSizes.of(source.tensors, layout).with_kv_beside(layout.beside_bytes)
    sizes = sizes.with_draft_records(gpu_draft_record_bytes(config, shape))
    if share is not None:
        sizes = share_sizes(sizes, share)
    reserved = gpu_reserved_bytes(
        config,
        shape,
        max_tokens,
        sizes,
        usable_bytes(device, config),
        float_weights=has_float_weights(source.tensors, shape),
        adapter_rank=0 if adapters is None else adapters.rank,
        on_cuda=device.type == "cuda",
    )
    if adapters is not None:
        reserved += adapters.num_bytes
    if draft_head is not None:
        reserved += draft_head.gpu_bytes(config, shape, max_tokens, on_cuda=device.type == "cuda")
    gpu = Gpu(free_bytes(device), reserved)
    if share is not None:
        return place_share(config, sizes, shape, gpu, share, counts, available_bytes())
    options = with_window_pool(placement_options(config, shape), config, layout, max_tokens)
    options = with_state_slots(options, config, sizes, gpu)
    options = with_unpacked_beside_kv(options, config, shape, max_tokens)
    in_file = has_experts_in_file(source, shape)
    placement = place_in_tiers(config, sizes, shape, options, gpu, available_bytes(), in_file=in_file)
    if placement.ram_slots is not None:
        log.info(
            "RAM holds %.2f of %.2f GiB of the experts that are not on the GPU alone; the others are read from disk "
            "when a text uses them%s",
            slot_bytes(sizes, placement.ram_slots) / GIB,
            slot_bytes(sizes, ram_expert_counts(placement)) / GIB,
            limit_note(),
        )
    if placement.begins_in_ram and config.n_gpu_layers is None:
        log.info(
            "the CPU computes the embedding and the first %d of %d layers, the GPU the others; --n-gpu-layers or "
            "--placement-rules choose otherwise",
            placement.layers_in_ram,
            len(placement.layers),
        )
    return placement


def check_kv_numbers(layout: KvLayout, device: torch.device) -> None:
    """Raises ConfigError for a KV dtype that this GPU has no instructions for."""
    if layout.dtype != FP8 or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"--kv-cache-dtype fp8: {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; fp8 needs 8.9 or later: say q8_0"
        )
