"""What a gated feed-forward makes of its two products."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """The specification is `activate` of ../experts/reference.py."""
    if ACTIVATION == "silu":
        out = gate / (1.0 + tl.exp(-gate)) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_oai")
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        out = (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    return out
