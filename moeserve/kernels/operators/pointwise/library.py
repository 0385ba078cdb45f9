"""The pointwise operators of torch.ops.moeserve."""

from __future__ import annotations

from typing import Any

from moeserve.kernels.operators.pointwise.functions import clamp, minimum, sigmoid, silu
from moeserve.kernels.operators.pointwise.op import pointwise


@pointwise
def silu_mul(gate: Any, up: Any) -> Any:
    """silu(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""
    return silu(gate) * up


@pointwise
def swiglu_oai(gate: Any, up: Any) -> Any:
    """(up + 1) * gate * sigmoid(1.702 * gate), with gate at most 7 and up clamped to [-7, 7] (gpt-oss,
    https://arxiv.org/abs/2508.10925)."""
    gate, up = minimum(gate, 7.0), clamp(up, -7.0, 7.0)
    return (up + 1.0) * gate * sigmoid(1.702 * gate)


@pointwise
def sigmoid_mul(x: Any, gate: Any) -> Any:
    """x * sigmoid(gate): the output of gated attention (Qiu et al. 2025, https://arxiv.org/abs/2505.06708)."""
    return x * sigmoid(gate)
