"""The buffers of a step on the GPU, by the size that the step is rounded up to.

Steps run one after another, so the rooms of all sizes lie over one another in one arena. What a kernel keeps between
steps (counters that it leaves at zero) has memory of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.op import DecodeWorkspace
from moeserve.kernels.experts.op import BlockWorkspace
from moeserve.kernels.linear.op import GEMV_TOKENS, gemv_tokens
from moeserve.models.qwen3moe.config import Qwen3MoeConfig

ALIGNMENT = 256
# Steps of up to so many rows keep what is between two products in float32: it costs them nothing. Larger ones round it,
# but not where weights are floats: there it would be much of the error (BF16, a whole prompt: 5.6e-5 from the truth,
# where llama.cpp is at 3.6e-5).
FLOAT_ROWS = 64
MAX_DECODE_ROWS = 256  # rows that decode attention has splits for; more go in parts


def step_sizes(max_tokens: int) -> list[int]:
    """What a step's rows are rounded up to: powers of two. Rows beyond a step's own are skipped by every kernel, so
    that the roundness costs little; each size is compiled for and recorded once."""
    sizes = [1]
    while sizes[-1] < max_tokens:
        sizes.append(2 * sizes[-1])
    return sizes


class Arena:
    """One buffer that is dealt out from the start, again for every room. Without a buffer it only measures."""

    def __init__(self, device: torch.device, nbytes: int | None = None) -> None:
        self._device = device
        self._buffer = None if nbytes is None else torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.used = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Without content."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start, self.used = self.used, self.used + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._buffer[start : start + nbytes].view(dtype).view(shape)


class Room:
    """For steps of up to `rows` rows."""

    def __init__(
        self,
        c: Qwen3MoeConfig,
        arena: Arena,
        rows: int,
        floats: torch.dtype,
        device: torch.device,
        *,
        float_weights: bool,
    ) -> None:
        """floats: of what the tensor cores multiply. float_weights: not quantised."""
        arena.used = 0
        self.rows = rows
        wide = torch.float32 if rows <= FLOAT_ROWS or float_weights else floats
        acts = torch.float32 if rows <= GEMV_TOKENS else floats
        self.blocks = BlockWorkspace(rows, c.top_k, c.num_experts, device)
        self.uses_gemv = self.blocks.method.up is None  # experts/small_batch.py's
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.x = arena.take(rows, c.hidden_size)  # the residual stream
        self.y = _activations(arena, rows, c.hidden_size, acts, quantised=self.uses_gemv)  # its norm
        # The same in float32. Of all products the router's is where rounding tells most: it moves a token to another
        # expert (BF16, a whole prompt: 4.6e-5 from the truth with a rounded one).
        assert self.y.x is not None
        self.exact_y = self.y.x if rows <= GEMV_TOKENS else arena.take(rows, c.hidden_size)
        self.projected = arena.take(rows * (heads + 2 * kv_heads), dtype=wide)  # q, k and v
        self.q = arena.take(rows, c.num_heads, c.head_dim, dtype=torch.float16)
        self.attended = _activations(arena, rows, heads, acts, quantised=rows <= GEMV_TOKENS)
        self.output = arena.take(rows, 1, c.hidden_size, dtype=wide)  # of the attention block
        self.router_logits = arena.take(rows, c.num_experts)
        self.ids = arena.take(rows, c.top_k, dtype=torch.int32)
        self.local_expert_ids = arena.take(
            rows, c.top_k, dtype=torch.int32
        )  # ids' places among the GPU's experts
        self.streamed = arena.take(rows, c.top_k, dtype=torch.int32)  # among those streamed to it
        self.weights = arena.take(rows, c.top_k)
        self.h = _activations(arena, rows * c.top_k, c.expert_ff, acts, quantised=self.uses_gemv)
        # Of the experts here: a token's sum, or for many tokens a part for every route.
        self.parts = arena.take(rows, 1 if self.uses_gemv else c.top_k, c.hidden_size, dtype=wide)
        self.from_cpu = arena.take(rows, c.hidden_size)  # what the experts in RAM add
        self.decode = DecodeWorkspace(
            min(rows, MAX_DECODE_ROWS), c.num_heads, c.num_kv_heads, c.head_dim, device
        )


class Head:
    """Where up to `rows` rows become logits."""

    def __init__(
        self, c: Qwen3MoeConfig, logits: Tensor, rows: int, floats: torch.dtype, device: torch.device
    ) -> None:
        few = rows <= gemv_tokens(logits.shape[1])
        self.final = GpuActivations.empty(
            rows, c.hidden_size, device, dtype=torch.float32 if few else floats, quantised=few
        )
        self.logits = logits[:rows]  # float32 [rows, vocab]


def _activations(
    arena: Arena, rows: int, cols: int, dtype: torch.dtype, *, quantised: bool
) -> GpuActivations:
    x = arena.take(rows, cols, dtype=dtype)
    if not quantised:
        return GpuActivations(x, None, None)
    return GpuActivations(x, arena.take(rows, cols, dtype=torch.int8), arena.take(rows, cols // 32))


def room_bytes(c: Qwen3MoeConfig, rows: int, floats: torch.dtype, *, float_weights: bool) -> int:
    """Of the arena."""
    meta = torch.device("meta")
    measured = Arena(meta)
    Room(c, measured, rows, floats, meta, float_weights=float_weights)
    return measured.used
