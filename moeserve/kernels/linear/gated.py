"""What a gated feed-forward makes of its two products, on tiles."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_mul(gate, up):
    """silu(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gelu_mul(gate, up):
    """gelu(gate) * up in GELU's tanh form (https://arxiv.org/abs/1606.08415): sigmoid(2 x) is (1 + tanh(x)) / 2 without
    its cancellation."""
    inner = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))  # 2 sqrt(2 / pi)
    return gate * (1.0 / (1.0 + tl.exp(-inner))) * up


@triton.jit
def swiglu_oai(gate, up):
    """(up + 1) * gate * sigmoid(1.702 * gate), gate at most 7 and up within 7 of 0 (gpt-oss,
    https://arxiv.org/abs/2508.10925)."""
    gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * gate * (1.0 / (1.0 + tl.exp(-1.702 * gate)))


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """gate, up: float32 tiles. The specification is `activate` of ../experts/reference.py."""
    if ACTIVATION == "silu":
        out = silu_mul(gate, up)
    elif ACTIVATION == "gelu":
        out = gelu_mul(gate, up)
    else:
        tl.static_assert(ACTIVATION == "swiglu_oai")
        out = swiglu_oai(gate, up)
    return out
