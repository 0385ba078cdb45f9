"""Pointwise operations from expressions: a Python function becomes a Triton kernel with broadcasting, any strides
and torch's type promotion, generated once per kind of arguments (the idea is FlagGems'). On a CPU, torch computes."""

from moeserve.kernels.operators.pointwise.functions import (
    clamp,
    erf,
    exp,
    log,
    maximum,
    minimum,
    rsqrt,
    sigmoid,
    silu,
    sqrt,
    tanh,
    where,
)
from moeserve.kernels.operators.pointwise.op import Pointwise, pointwise

__all__ = [
    "Pointwise", "clamp", "erf", "exp", "log", "maximum", "minimum", "pointwise", "rsqrt", "sigmoid", "silu", "sqrt",
    "tanh", "where",
]  # fmt: skip
