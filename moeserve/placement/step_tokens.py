"""Default number of tokens per step, if --max-num-batched-tokens is not given.

A few hundred tokens keep a CPU busy. If experts are on disk, a step with a prompt reads nearly all experts that RAM
does not hold, however long the prompt is, so steps have more tokens (docs/results/cpu-engine.md). A GPU needs
thousands: streaming experts to it takes almost the same time for 500 tokens as for 4,000, and its own experts are used
more efficiently with more rows (docs/results/experts-in-ram.md). The memory of the step buffers limits the number.
Running answers wait for a step's prompts: router/core/limits.py allows a step with both fewer tokens, and
router/core/policy/pace.py shortens chunks further where necessary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import gpu_arena_bytes
from moeserve.placement.engine_memory import cpu_workspace_bytes

ON_CPU = 512
MOST_FROM_DISK = 2048
SHARE_OF_EXPERT_RAM = 0.05  # step buffers, as a share of the RAM for experts if others are on disk
MOST_ON_GPU = 16384
SHARE_OF_GPU = 0.03  # share of the GPU memory that the server may use, for step buffers


def step_tokens(
    wished: int | None, shape: ModelShape, gpu_bytes: int | None, expert_ram: int | None = None
) -> int:
    """Returns the tokens per step: `wished` if given; else a power of two, at least ON_CPU. gpu_bytes: GPU memory that
    the server may use; None: the engine runs on the CPU. expert_ram: bytes of RAM for experts if the CPU engine reads
    others from disk; None: all experts are in RAM."""
    if wished is not None:
        return wished
    if gpu_bytes is not None:
        # Tensor cores multiply two-byte numbers, so bfloat16 and float16 take the same memory.
        on_gpu = partial(gpu_arena_bytes, shape, floats="bfloat16", float_weights=False)
        return _within(SHARE_OF_GPU * gpu_bytes, MOST_ON_GPU, lambda tokens: on_gpu(max_tokens=tokens))
    if expert_ram is not None:
        return _within(SHARE_OF_EXPERT_RAM * expert_ram, MOST_FROM_DISK, partial(cpu_workspace_bytes, shape))
    return ON_CPU


def _within(room: float, most: int, buffer_bytes: Callable[[int], int]) -> int:
    """Returns `most` tokens, halved until their buffers take at most `room` bytes, but at least ON_CPU."""
    while most > ON_CPU and buffer_bytes(most) > room:
        most //= 2
    return most
