"""Counts an engine's memory besides weights, KV and streamed experts, from the declarations by which it allocates."""

from __future__ import annotations

from moeserve.config import ServerConfig, num_drafts
from moeserve.kv.layout import KvLayout
from moeserve.kv.slot_kinds import spare_bytes
from moeserve.kv.tier_sizes import staging_bytes
from moeserve.models.buffers import GpuFloat
from moeserve.models.cpu_step_buffers import (
    CPU_LOGIT_ROWS,
    cpu_step_buffers,
    draft_records,
    most_drafts,
    ngram_records,
)
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import (
    GPU_LOGIT_ROWS,
    gpu_arena_bytes,
    gpu_draft_records,
    gpu_state_drafts,
    head_arena_bytes,
    next_token_bytes,
    step_sizes,
)
from moeserve.placement.sizes import ModelSizes

CUDA_CONTEXT_BYTES = 512 << 20  # of GPU memory, by each process that uses it
# CUDA graphs and the kernels' code. Measured: docs/results/experts-in-ram.md.
GPU_OVERHEAD_BYTES = 640 << 20
# The allocator loses part of the GPU's weights memory to rounding and gaps: 3.1 of 134 GiB for a model that filled a
# GPU with 133 GiB of weights (docs/results/several-gpus.md).
ALLOCATOR_LOSS = 32  # loss as a fraction: 1/32


def gpu_reserved_bytes(
    config: ServerConfig,
    shape: ModelShape,
    max_tokens: int,
    sizes: ModelSizes,
    usable: int,
    *,
    float_weights: bool,
    adapter_rank: int = 0,
    on_cuda: bool = True,
) -> int:
    """Returns the bytes that a GPU engine needs besides weights and KV: step buffers for `max_tokens` rows, logits,
    slot and RoPE tables, the sampler, staging for KV pages, spare KV slots, a step's keys; on CUDA also its overhead
    and the allocator's loss. Without `gpu_draft_record_bytes`, which depend on the placement. sizes: the sizes of the
    weights. usable: bytes of GPU memory that the engine may use. adapter_rank: see `gpu_step_buffers`. on_cuda: False
    for Triton's interpreter, which multiplies in float32."""
    length = config.max_model_len or shape.context_length
    head_rows = max(size for size in step_sizes(max_tokens) if size <= GPU_LOGIT_ROWS)
    logits = 4 * head_rows * shape.vocab_size
    slot_table = 4 * (config.max_num_seqs + 1) * length
    angles = 4 * length * sum(form.rotary_dim for form in shape.forms)
    floats: GpuFloat = "bfloat16" if on_cuda else "float32"

    def block_bytes() -> int:
        return next_token_bytes(shape, max_tokens, config.max_num_seqs, num_drafts(config), floats)

    of_cuda = GPU_OVERHEAD_BYTES + min(sizes.gpu_bytes, usable) // ALLOCATOR_LOSS
    return (
        gpu_arena_bytes(
            shape,
            max_tokens,
            floats,
            float_weights=float_weights,
            adapter_rank=adapter_rank,
            length=length,
        )
        + logits
        + head_arena_bytes(shape, head_rows, floats)
        + slot_table
        + angles
        + gpu_sampler_bytes(config.max_num_seqs, shape.vocab_size, head_rows)
        + staging_bytes(config, KvLayout(shape).state_bytes())
        + spare_bytes(KvLayout(shape), config.max_num_seqs)
        + KvLayout(shape).step_key_bytes(step_sizes(max_tokens)[-1])
        + (0 if shape.next_token_layer is None else block_bytes())
        + (0 if shape.orders is None else 4 * shape.orders.num_columns)
        + (of_cuda if on_cuda else 0)
    )


def gpu_draft_record_bytes(config: ServerConfig, shape: ModelShape) -> int:
    """Returns the bytes in which a recurrent layer on a GPU records drafts; 0 without drafts."""
    drafts = gpu_state_drafts(shape, config.max_num_seqs, num_drafts(config))
    return gpu_draft_records(shape, drafts).nbytes if drafts else 0


def gpu_sampler_bytes(max_num_seqs: int, vocab: int, rows: int) -> int:
    """Returns the sampler's bytes: the requests' token history, and three float or id arrays [rows, vocab]."""
    return 4 * vocab * (max_num_seqs + 3 * rows)


def cpu_workspace_bytes(shape: ModelShape, rows: int) -> int:
    """Returns the bytes of RAM for the buffers of a CPU step of `rows` rows, without logits."""
    return sum(buffer.nbytes for buffer in cpu_step_buffers(shape, rows))


def draft_record_bytes(config: ServerConfig, shape: ModelShape, step_tokens: int) -> int:
    """Returns the bytes of RAM in which CPU recurrent layers record their states at drafts; 0 without drafts."""
    drafts = most_drafts(step_tokens, config.max_num_seqs, num_drafts(config))
    of_ngrams = ngram_records(shape, drafts)
    records = sum(buffer.nbytes for buffer in draft_records(shape, drafts).values())
    return records + (0 if of_ngrams is None else of_ngrams.nbytes)


def stage_record_bytes(config: ServerConfig, shape: ModelShape, layers_in_ram: int) -> int:
    """Returns the bytes of RAM in which recurrent layers before a GPU's record drafts; 0 without drafts."""
    drafts = gpu_state_drafts(shape, config.max_num_seqs, num_drafts(config))
    records = draft_records(shape, drafts) if drafts else {}
    return sum(buffer.nbytes for index, buffer in records.items() if index < layers_in_ram)


def cpu_logits_bytes(shape: ModelShape, max_num_seqs: int) -> int:
    """Returns the bytes of logits for the largest number of rows sampled together; the memory is allocated at first
    use."""
    return 4 * min(max_num_seqs, CPU_LOGIT_ROWS) * shape.vocab_size
