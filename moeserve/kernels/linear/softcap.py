"""Caps logits: cap * tanh(x / cap) (Gemma 2, https://arxiv.org/abs/2408.00118), in place."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel, pdl

BLOCK = 1024


@kernel
def softcap_kernel(x, SIZE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Replaces x float32 [SIZE] by CAP * tanh(x / CAP), in place. Grid (blocks of BLOCK numbers)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < SIZE
    scaled = tl.load(x + at, live, 0.0) / CAP
    # tanh(|y|) by an exponential that cannot overflow; its sign is y's.
    power = tl.exp(-2.0 * tl.abs(scaled))
    size = (1.0 - power) / (1.0 + power)
    tl.store(x + at, CAP * tl.where(scaled < 0.0, -size, size), live)


def softcap(x: Tensor, cap: float) -> None:
    """Replaces x (float32, contiguous) by cap * tanh(x / cap). cap > 0."""
    blocks = -(-x.numel() // BLOCK)
    softcap_kernel((blocks,), x, x.numel(), cap, BLOCK, pdl(), num_warps=4, launch_pdl=pdl())
