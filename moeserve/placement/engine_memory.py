"""The memory of an engine beside weights, KV and streamed experts: counted from the same data by which it allocates."""

from __future__ import annotations

from moeserve.config import ServerConfig, num_drafts
from moeserve.kv.layout import KvLayout
from moeserve.kv.tier_sizes import staging_bytes
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import (
    CPU_LOGIT_ROWS,
    GPU_LOGIT_ROWS,
    cpu_step_buffers,
    draft_records,
    gpu_arena_bytes,
    most_drafts,
    step_sizes,
)
from moeserve.placement.sizes import ModelSizes

# CUDA graphs and the kernels' code. Measured: docs/results/experts-in-ram.md.
GPU_OVERHEAD_BYTES = 640 << 20
# Of a GPU's weights, what the allocator loses to rounding and to gaps between them: 3.1 of 134 GiB where a model of 133
# had them full (docs/results/several-gpus.md).
ALLOCATOR_LOSS = 32  # as a divisor


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
    """Bytes that a GPU engine whose largest step has `max_tokens` rows takes beside weights and KV: the steps' buffers,
    logits, tables of slots and angles, the sampler, staging for pages of KV, and on CUDA its overhead and what the
    allocator loses of the weights. sizes: those of the weights. usable: bytes of the GPU that the engine may take.
    adapter_rank: as `gpu_step_buffers` has it. on_cuda: no for Triton's interpreter, which multiplies float32."""
    length = config.max_model_len or shape.context_length
    head_rows = max(size for size in step_sizes(max_tokens) if size <= GPU_LOGIT_ROWS)
    logits = 4 * head_rows * shape.vocab_size
    slot_table = 4 * (config.max_num_seqs + 1) * length
    angles = 4 * length * sum(form.rotary_dim for form in shape.forms)
    of_cuda = GPU_OVERHEAD_BYTES + min(sizes.gpu_bytes, usable) // ALLOCATOR_LOSS
    return (
        gpu_arena_bytes(
            shape,
            max_tokens,
            "bfloat16" if on_cuda else "float32",
            float_weights=float_weights,
            adapter_rank=adapter_rank,
        )
        + logits
        + slot_table
        + angles
        + gpu_sampler_bytes(config.max_num_seqs, shape.vocab_size, head_rows)
        + staging_bytes(config, KvLayout(shape).state_bytes())
        + (of_cuda if on_cuda else 0)
    )


def gpu_sampler_bytes(max_num_seqs: int, vocab: int, rows: int) -> int:
    """The requests' history, and three rows of floats or ids for each row of logits."""
    return 4 * vocab * (max_num_seqs + 3 * rows)


def cpu_workspace_bytes(shape: ModelShape, rows: int) -> int:
    """RAM of the CPU's step of up to `rows` rows, without logits."""
    return sum(buffer.nbytes for buffer in cpu_step_buffers(shape, rows))


def draft_record_bytes(config: ServerConfig, shape: ModelShape, step_tokens: int) -> int:
    """RAM of what a CPU's recurrent layers keep of drafts; 0 where there are none."""
    drafts = most_drafts(step_tokens, config.max_num_seqs, num_drafts(config))
    return sum(buffer.nbytes for buffer in draft_records(shape, drafts).values())


def cpu_logits_bytes(shape: ModelShape, max_num_seqs: int) -> int:
    """Bytes of the logits of as many rows as are ever sampled together: pages come with their first use."""
    return 4 * min(max_num_seqs, CPU_LOGIT_ROWS) * shape.vocab_size
