"""The activation of a gated feed-forward's two products, on tiles."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_mul(gate, up):
    """Returns silu(gate) * up, float32 elementwise (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gelu_mul(gate, up):
    """Returns gelu(gate) * up, float32 elementwise, with GELU's tanh form (https://arxiv.org/abs/1606.08415). sigmoid(2
    x) replaces (1 + tanh(x)) / 2, which suffers cancellation."""
    inner = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))  # 2 sqrt(2 / pi)
    return gate * (1.0 / (1.0 + tl.exp(-inner))) * up


@triton.jit
def relu_mul(gate, up):
    """Returns relu(gate) * up, elementwise; with gate = up it is the square of ReLU. NaN stays NaN."""
    return tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) * up


@triton.jit
def at_most(x, LIMIT: tl.constexpr):
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def within(x, LIMIT: tl.constexpr):
    return at_most(tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL), LIMIT)


@triton.jit
def clamped_silu_mul(gate, up, LIMIT: tl.constexpr):
    """Returns min(silu(gate), LIMIT) * clamp(up, -LIMIT, LIMIT), float32 elementwise."""
    return at_most(gate / (1.0 + tl.exp(-gate)), LIMIT) * within(up, LIMIT)


@triton.jit
def swiglu_oai(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Returns (u + 1) * g * sigmoid(ALPHA * g), float32 elementwise, with g = min(gate, LIMIT) and u = clamp(up,
    -LIMIT, LIMIT) (gpt-oss, https://arxiv.org/abs/2508.10925)."""
    gate = at_most(gate, LIMIT)
    return (within(up, LIMIT) + 1.0) * gate * (1.0 / (1.0 + tl.exp(-ALPHA * gate)))


@triton.jit
def tanh(x):
    """Returns tanh(x), float32 elementwise; NaN stays NaN. 1 - 2 / (1 + exp(2 x)) would lose digits near 0, where the
    Taylor series up to x^9 is exact to 1e-8."""
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) > 0.25, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)), near)


@triton.jit
def situ_mul(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Returns ALPHA * tanh(gate / ALPHA) * sigmoid(gate) * u, float32 elementwise, with u = LIMIT * tanh(up / LIMIT),
    or u = up if LIMIT is 0 (Kimi-K3, https://arxiv.org/abs/2607.24653)."""
    if LIMIT > 0:
        up = LIMIT * tanh(up / LIMIT)
    return ALPHA * tanh(gate / ALPHA) / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated(gate, up, FORM: tl.constexpr):
    """Returns the product of activated gate and up. gate, up: float32 tiles. FORM: a GatedForm. The specification is
    `activate` of ../experts/reference.py."""
    if FORM.activation == "silu":
        if FORM.limit > 0:
            out = clamped_silu_mul(gate, up, FORM.limit)
        else:
            out = silu_mul(gate, up)
    elif FORM.activation == "clamped_silu":
        if FORM.limit > 0:
            out = silu_mul(at_most(gate, FORM.limit), within(up, FORM.limit))
        else:
            out = silu_mul(gate, up)
    elif FORM.activation == "relu":
        out = relu_mul(gate, up)
    elif FORM.activation == "gelu":
        out = gelu_mul(gate, up)
    elif FORM.activation == "situ":
        out = situ_mul(gate, up, FORM.limit, FORM.alpha)
    else:
        tl.static_assert(FORM.activation == "swiglu_oai")
        out = swiglu_oai(gate, up, FORM.limit, FORM.alpha)
    return out
