"""How many tokens a step takes where --max-num-batched-tokens does not say.

On the CPU a few hundred keep it busy. A GPU wants thousands: a pass over experts that are streamed to it takes much
the same time for 500 tokens as for 4,000, and its own experts are read faster by more rows
(docs/results/2026-11-20-hybrid-engine.md). What bounds them is the memory of the step's buffers. How long answers
under way wait for prompts is the scheduler's business (router/core/pace.py), which takes less than a whole step where
it must.
"""

from __future__ import annotations

from moeserve.models.qwen3moe.config import Qwen3MoeConfig

ON_CPU = 512
MOST_ON_GPU = 8192
SHARE_OF_GPU = 0.02  # of the memory that the server may use, for the buffers


def step_tokens(wished: int | None, model: Qwen3MoeConfig, gpu_bytes: int | None) -> int:
    """gpu_bytes: that the server may use; None: it runs on the CPU. Else a power of two, ON_CPU at least."""
    if wished is not None:
        return wished
    if gpu_bytes is None:
        return ON_CPU
    tokens = MOST_ON_GPU
    while tokens > ON_CPU and tokens * row_bytes(model) > SHARE_OF_GPU * gpu_bytes:
        tokens //= 2
    return tokens


def row_bytes(model: Qwen3MoeConfig, *, float_weights: bool = False) -> int:
    """GPU memory of one row of a large step, in models/qwen3moe/gpu_room.py: what tensor cores multiply has two bytes,
    the residual stream, the router's input, the CPU's part and router logits four; what products leave two, with
    `float_weights` four."""
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    out = 4 if float_weights else 2
    # x, its norm twice, attention's output, the CPU's part, experts' parts
    hidden = 4 + 2 + 4 + out + 4 + out * model.top_k
    attention = out * (heads + 2 * kv) + 2 * heads + 2 * heads  # q, k and v, q rotated, what was attended to
    routes = 4 * model.num_experts + 12 * model.top_k
    return hidden * model.hidden_size + attention + routes + 2 * model.top_k * model.expert_ff
