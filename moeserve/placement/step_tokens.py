"""How many tokens a step takes where --max-num-batched-tokens does not say.

On the CPU a few hundred keep it busy. A GPU wants thousands: a pass over experts that are streamed to it takes much
the same time for 500 tokens as for 4,000, and its own experts are read faster by more rows
(docs/results/experts-in-ram.md). What bounds them is the memory of the step's buffers. How long answers
under way wait for prompts is decided by router/core/policy/pace.py, which takes less than a whole step where it must.
"""

from __future__ import annotations

from functools import partial

from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import gpu_arena_bytes

ON_CPU = 512
MOST_ON_GPU = 8192
SHARE_OF_GPU = 0.03  # of the memory that the server may use, for the buffers


def step_tokens(wished: int | None, shape: ModelShape, gpu_bytes: int | None) -> int:
    """gpu_bytes: that the server may use; None: it runs on the CPU. Else a power of two, ON_CPU at least."""
    if wished is not None:
        return wished
    if gpu_bytes is None:
        return ON_CPU
    tokens = MOST_ON_GPU
    # What tensor cores multiply has two bytes, in bfloat16 as in float16.
    buffers = partial(gpu_arena_bytes, shape, floats="bfloat16", float_weights=False)
    while tokens > ON_CPU and buffers(max_tokens=tokens) > SHARE_OF_GPU * gpu_bytes:
        tokens //= 2
    return tokens
