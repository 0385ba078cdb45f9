"""Default number of tokens per step, if --max-num-batched-tokens is not given.

A few hundred tokens keep a CPU busy. A GPU needs thousands: streaming experts to it takes almost the same time for
500 tokens as for 4,000, and its own experts are used more efficiently with more rows
(docs/results/experts-in-ram.md). The memory of the step buffers limits the number. Running answers wait for a step's
prompts: router/core/limits.py allows a step with both fewer tokens, and router/core/policy/pace.py shortens chunks
further where necessary.
"""

from __future__ import annotations

from functools import partial

from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import gpu_arena_bytes

ON_CPU = 512
MOST_ON_GPU = 16384
SHARE_OF_GPU = 0.03  # share of the GPU memory that the server may use, for step buffers


def step_tokens(wished: int | None, shape: ModelShape, gpu_bytes: int | None) -> int:
    """Returns the tokens per step: `wished` if given; else a constant on the CPU, and on a GPU a power of two, at
    least ON_CPU. gpu_bytes: GPU memory that the server may use; None: the engine runs on the CPU."""
    if wished is not None:
        return wished
    if gpu_bytes is None:
        return ON_CPU
    tokens = MOST_ON_GPU
    # Tensor cores multiply two-byte numbers, so bfloat16 and float16 take the same memory.
    buffers = partial(gpu_arena_bytes, shape, floats="bfloat16", float_weights=False)
    while tokens > ON_CPU and buffers(max_tokens=tokens) > SHARE_OF_GPU * gpu_bytes:
        tokens //= 2
    return tokens
