"""Predicts the memory of all processes of a server (as PSS: shared pages count once), and of the GPU.

The processes' memory beside weights and KV was measured (`processes/resident_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.cli.plan.tower import CUDA_LIBRARIES_BYTES, TowerMemory
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY
from moeserve.kv.layout import KvLayout, check_cpu_reads
from moeserve.kv.slot_kinds import slot_kinds, spare_bytes
from moeserve.kv.state_capacity import state_slots
from moeserve.kv.tier_sizes import default_ram_bytes
from moeserve.kv.window_capacity import KvPools, divide
from moeserve.models.cpu_step_buffers import int8_row_bytes
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import step_sizes
from moeserve.placement import ModelSizes, Placement
from moeserve.placement.engine_memory import (
    CUDA_CONTEXT_BYTES,
    cpu_logits_bytes,
    cpu_workspace_bytes,
    draft_record_bytes,
    stage_record_bytes,
)
from moeserve.processes.resident_memory import LIBRARIES_BYTES, SERVER_BYTES, VOCABULARY_BYTES
from moeserve.worker.adapters.memory import AdapterMemory
from moeserve.worker.loading.draft_model import DraftModel


def usable_gpu_bytes(config: ServerConfig, gpu: int) -> int:
    """Returns the bytes that the engine may use of a GPU with `gpu` bytes: its budget, or everything except the CUDA
    context. The server uses the same number to compute the most tokens of a step
    (worker/loading/gpu/device_memory.py)."""
    budget = config.gpu_memory_budget
    return gpu - CUDA_CONTEXT_BYTES if budget is None else int(budget * GIB)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. Pages of the pools of KV and states are allocated at their first use: `start` does not count them, `full`
    counts all."""

    ram_weights: int
    ram_kv: int
    ram_states: int  # recurrent, running and snapshots
    ram_draft_model: int  # weights, states and buffers of --speculative-model; on a GPU they are in gpu_other
    ram_other: int  # processes, tokenizers, the steps' buffers
    ram_tower: int  # the vision tower if it is not on the GPU, and its process
    ram_images: int  # embeddings of pictures that may come again
    ram_adapters: int  # LoRA adapters of --lora-modules
    ram_later_adapters: int  # kept free for adapters of --lora-dir
    ram_tier: int  # --kv-ram: the prefix cache's tier in RAM
    gpu_weights: int
    gpu_kv: int
    gpu_states: int
    gpu_stream: int  # buffers for streamed experts
    gpu_unpacked: int  # experts as 16-bit floats
    gpu_adapters: int  # LoRA adapters, and memory kept free for more
    gpu_tower: int  # the vision tower, its context and a picture
    gpu_other: int
    kv_tokens: int
    window_slots: int  # of the windowed layers' own KV pool; 0: all layers have one
    max_model_len: int

    @property
    def ram_start(self) -> int:
        return self.ram_weights + self.ram_draft_model + self.ram_other + self.ram_tower + self.ram_adapters

    @property
    def ram_full(self) -> int:
        later = self.ram_later_adapters + self.ram_images
        return self.ram_start + later + self.ram_kv + self.ram_states + self.ram_tier

    @property
    def gpu(self) -> int:
        return (
            self.gpu_weights
            + self.gpu_kv
            + self.gpu_states
            + self.gpu_stream
            + self.gpu_unpacked
            + self.gpu_adapters
            + self.gpu_tower
            + self.gpu_other
        )


def processes_bytes(config: ServerConfig, model: ModelShape, placement: Placement, step_tokens: int) -> int:
    """Returns the RAM of all processes beside weights and KV, once the largest step has run."""
    tokens = max(step_tokens, config.max_num_seqs)
    fixed = LIBRARIES_BYTES + SERVER_BYTES + VOCABULARY_BYTES * model.vocab_size
    if not placement.uses_gpu:
        drafts = draft_record_bytes(config, model, step_tokens)
        logits = cpu_logits_bytes(model, config.max_num_seqs)
        return fixed + _cpu_step_bytes(config, model, tokens) + logits + drafts
    rows = step_sizes(tokens)[-1]
    shared = _handoff_bytes(model, rows) if placement.shares_layers else 0
    cpu_stage = (
        _cpu_step_bytes(config, model, rows) if placement.layers_in_ram else 4 * rows * model.residual_width
    )
    cpu_stage += stage_record_bytes(config, model, placement.layers_in_ram)
    return fixed + CUDA_LIBRARIES_BYTES + shared + (cpu_stage if placement.begins_in_ram else 0)


def _cpu_step_bytes(config: ServerConfig, model: ModelShape, rows: int) -> int:
    """Returns the bytes of a CPU's step buffers, and of keys and slots that are not counted per token."""
    layout = KvLayout(model)
    keys = layout.step_key_bytes(rows) + spare_bytes(layout, config.max_num_seqs)
    return cpu_workspace_bytes(model, rows) + keys


def _handoff_bytes(model: ModelShape, rows: int) -> int:
    """Returns the bytes of the memory that GPU and CPU share (kernels/handoff/region.py), for two layers: rows as int8
    with scales (or as floats if their columns are gathered), results as floats, and routes, and the same of gathered
    rows by route. torch rounds pinned memory up to powers of two."""
    columns = 0 if model.orders is None else model.orders.expert_columns
    needed = int(2 * rows * ((8 if columns else 5.5) * model.hidden_size + 12 * model.top_k))
    return (1 << (needed - 1).bit_length()) + rows * model.top_k * int8_row_bytes(columns)


def _ram_tier(
    config: ServerConfig, placement: Placement, pool_bytes: int, free_bytes: int, *, has_window_pool: bool
) -> int:
    """Returns the bytes of the tier in RAM, as the server would choose them. Raises ConfigError if the server would
    refuse the options."""
    if not placement.uses_gpu or placement.layers_in_ram:
        if config.kv_ram:
            where = "where the first layers are the CPU's" if placement.uses_gpu else "on the CPU engine"
            raise ConfigError(f"--kv-ram: there is no RAM tier {where}; leave it out")
        return 0
    if config.kv_ram is None:
        return default_ram_bytes(config, pool_bytes, free_bytes, has_window_pool=has_window_pool)
    wanted = int(config.kv_ram * GIB)
    if wanted > free_bytes:
        raise ConfigError(
            f"--kv-ram {config.kv_ram:g}: {free_bytes / GIB:.1f} GiB of RAM are free after the weights; lower it"
        )
    return wanted


def _kv_pools(
    config: ServerConfig,
    layout: KvLayout,
    placement: Placement,
    tokens: int,
    free_ram: int,
    step_tokens: int,
) -> KvPools:
    """Returns the pools that `kv/capacity.py` makes of the room for `tokens` tokens in one pool."""
    wanted = config.max_model_len or layout.shape.context_length
    num_bytes = int(free_ram * SHARE_OF_FREE_MEMORY)
    if placement.kv_bytes is not None:
        num_bytes = placement.kv_bytes
    return divide(
        *(config, layout, tokens, config.max_num_seqs * wanted, num_bytes),
        max(step_tokens, config.max_num_seqs),
        is_divided=placement.uses_gpu and placement.layers_in_ram > 0,
    )


def predict(
    config: ServerConfig,
    layout: KvLayout,
    sizes: ModelSizes,
    placement: Placement,
    ram: int,
    gpu_other: int,
    step_tokens: int,
    adapters: AdapterMemory,
    tower: TowerMemory,
    *,
    gpu_adapters: int = 0,
    draft_model: DraftModel | None = None,
) -> Memory:
    """Returns the predicted memory of each part of the server, in bytes. ram: bytes that the server may take. tower:
    the vision tower's memory. adapters, gpu_adapters: the adapters' memory in RAM and on the GPU. draft_model: the
    small model, or the head, whose KV is part of `layout`; on a GPU, gpu_other has the rest. The KV pool gets the size
    that `kv/capacity.py` computes; the placement says which part of it is on the GPU."""
    model = layout.shape
    wanted = config.max_model_len or model.context_length
    other = processes_bytes(config, model, placement, step_tokens)
    cpu_layers = placement.layers_in_ram
    images = 0 if config.mmproj is None else int(config.image_cache * GIB)
    small = 0
    if draft_model is not None and not placement.uses_gpu:
        rows = max(step_tokens, config.max_num_seqs)
        small = draft_model.weight_bytes + draft_model.buffer_bytes(rows, config.max_num_seqs)
    used = other + small + placement.cpu_weight_bytes + adapters.reserved
    free = max(0, ram - used - tower.ram - images)
    slots = placement.state_slots
    if not placement.uses_gpu or placement.layers_in_ram:
        check_cpu_reads(layout)
    if not placement.uses_gpu:
        running = config.max_num_seqs * sizes.state_bytes()
        slots = state_slots(config, sizes.state_bytes(), max(free, running)).num_slots
    ram_states = slots * sizes.state_bytes(0, cpu_layers)
    free = max(0, free - ram_states)
    most = config.max_total_tokens or config.max_num_seqs * wanted
    limits = [most]
    # KV of drafts: of the next-token block's layer, which `sizes` does not contain, and of the small model.
    beside = 0 if placement.uses_gpu else layout.token_bytes() - sizes.kv_bytes()
    ram_token = sizes.kv_bytes(0, cpu_layers) + beside
    if cpu_layers and config.max_total_tokens is None:
        limits.append(int(free * SHARE_OF_FREE_MEMORY) // max(1, ram_token))
    if placement.kv_tokens is not None and config.max_total_tokens is None:
        limits.append(placement.kv_tokens)
    tokens = min(limits)
    pools = _kv_pools(config, layout, placement, tokens, free, step_tokens)
    tokens = pools.num_slots
    ram_kv, gpu_kv = tokens * ram_token, tokens * sizes.kv_bytes(cpu_layers)
    if pools.num_window_slots:
        saved = (tokens - pools.num_window_slots) * layout.token_bytes(layout.windowed_layers)
        ram_kv, gpu_kv = (ram_kv, gpu_kv - saved) if placement.uses_gpu else (ram_kv - saved, gpu_kv)
    return Memory(
        ram_weights=placement.cpu_weight_bytes,
        ram_kv=ram_kv,
        ram_states=ram_states,
        ram_draft_model=small,
        ram_other=other,
        ram_tower=tower.ram,
        ram_images=images,
        ram_adapters=adapters.resident,
        ram_later_adapters=adapters.later,
        ram_tier=_ram_tier(
            *(config, placement, gpu_kv, free - ram_kv),
            has_window_pool=pools.num_window_slots > 0 or len(slot_kinds(layout, 1, 1)) > 0,
        )
        if draft_model is None or draft_model.head is None or not placement.uses_gpu
        else 0,  # beside a head
        gpu_weights=placement.gpu_weight_bytes,
        gpu_kv=gpu_kv,
        gpu_states=slots * sizes.state_bytes(cpu_layers),
        gpu_stream=placement.stream_bytes,
        gpu_unpacked=placement.unpacked_bytes,
        gpu_adapters=gpu_adapters,
        gpu_tower=tower.gpu,
        gpu_other=gpu_other,
        kv_tokens=tokens,
        window_slots=pools.num_window_slots,
        max_model_len=min(wanted, tokens),
    )
