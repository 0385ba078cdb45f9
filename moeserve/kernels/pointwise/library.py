"""This program's own pointwise operations: operators of torch.ops.moeserve, and what the kernels that fuse one with a
product call on their tiles (`generated.device_function`)."""

from __future__ import annotations

from typing import Any

from moeserve.kernels.pointwise.functions import clamp, minimum, sigmoid, silu, tanh
from moeserve.kernels.pointwise.op import pointwise


@pointwise
def silu_mul(gate: Any, up: Any) -> Any:
    """silu(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""
    return silu(gate) * up


@pointwise
def swiglu_oai(gate: Any, up: Any) -> Any:
    """(up + 1) * gate * sigmoid(1.702 * gate), of a gate of at most 7 and an up within 7 of 0 (gpt-oss,
    https://arxiv.org/abs/2508.10925)."""
    gate, up = minimum(gate, 7.0), clamp(up, -7.0, 7.0)
    return (up + 1.0) * gate * sigmoid(1.702 * gate)


@pointwise
def gelu_mul(gate: Any, up: Any) -> Any:
    """gelu(gate) * up, of GELU's tanh form (https://arxiv.org/abs/1606.08415)."""
    inner = 1.5957691216057308 * (gate + 0.044715 * gate**3)  # 2 sqrt(2 / pi)
    return gate * sigmoid(inner) * up  # sigmoid(2 x) is (1 + tanh(x)) / 2, without its cancellation


@pointwise
def softcap(x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap) (Gemma 2, https://arxiv.org/abs/2408.00118)."""
    return cap * tanh(x / cap)


@pointwise
def sigmoid_mul(x: Any, gate: Any) -> Any:
    """x * sigmoid(gate): what leaves attention through a gate (Qiu et al. 2025, https://arxiv.org/abs/2505.06708)."""
    return x * sigmoid(gate)
