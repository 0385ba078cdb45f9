"""The first layers of a model on the CPU beside a GPU: the memory of their requests, and their decoder."""

from __future__ import annotations

import torch

from moeserve.config import ServerConfig
from moeserve.kv.cache import KvCache
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY, KvCapacity, KvMemoryBudget
from moeserve.kv.layout import KvLayout
from moeserve.kv.slot_kinds import spare_bytes
from moeserve.kv.states import StateCache
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.step_buffers import step_sizes
from moeserve.placement import Placement
from moeserve.placement.engine_memory import stage_record_bytes
from moeserve.processes.free_memory import available_bytes
from moeserve.worker.engines.gpu.cpu_stage import CpuStage
from moeserve.worker.loading.gpu.load_weights import InRam


def kv_budgets(
    config: ServerConfig, placement: Placement, layout: KvLayout, step_rows: int
) -> list[KvMemoryBudget]:
    """Returns one budget per device, because a token's KV is where its layers are."""
    assert placement.kv_bytes is not None
    in_ram = placement.layers_in_ram
    # None: all, and a head that drafts, which is there only if all layers are
    on_gpu = range(in_ram, len(layout.shape.loaded_layers)) if in_ram else None
    budgets = [KvMemoryBudget("GPU memory", placement.kv_bytes, on_gpu)]
    if in_ram:
        free = available_bytes() - placement.state_slots * layout.state_bytes(range(in_ram))
        free -= spare_bytes(layout, config.max_num_seqs) + layout.step_key_bytes(step_rows)
        free -= stage_record_bytes(config, layout.shape, in_ram)
        budgets.append(KvMemoryBudget("memory", free, range(in_ram), SHARE_OF_FREE_MEMORY))
    return budgets


def make_cpu_stage(
    in_ram: InRam | None,
    layout: KvLayout,
    placement: Placement,
    capacity: KvCapacity,
    max_tokens: int,
    device: torch.device,
    max_state_drafts: int,
) -> CpuStage | None:
    """Returns the stage that computes the first layers on the CPU, with its KV, states and buffers; None if all layers
    are on the GPU. max_tokens: rows of the largest step. max_state_drafts: most drafts of a step, for models with
    recurrent layers."""
    if in_ram is None or in_ram.cpu_stage is None:
        return None
    rows = step_sizes(max_tokens)[-1]
    kv = KvCache(
        *(layout, capacity.num_slots, range(placement.layers_in_ram)),
        kinds=capacity.kinds,
        num_states=placement.state_slots,
        step_rows=rows,
    ).layers
    model = CpuDecoder(
        layout.shape,
        in_ram.cpu_stage,
        in_ram.stream,
        kv,
        rows,
        capacity.max_model_len,
        states=StateCache(layout, placement.state_slots, range(placement.layers_in_ram)).layers,
        most_drafts=max_state_drafts,
        pinned=device.type == "cuda",
    )
    return CpuStage(in_ram.stream, model)
