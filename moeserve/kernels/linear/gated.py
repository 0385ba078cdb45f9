"""What a gated feed-forward makes of its two products: the expressions of pointwise/library.py, on tiles."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.pointwise import library
from moeserve.kernels.pointwise.generated import device_function

silu_mul = device_function(library.silu_mul.expression)
gelu_mul = device_function(library.gelu_mul.expression)
swiglu_oai = device_function(library.swiglu_oai.expression)


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
