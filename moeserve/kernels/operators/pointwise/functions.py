"""Functions for expressions, besides Python's operators."""

from __future__ import annotations

from typing import Any

from moeserve.kernels.operators.pointwise.expression import apply

# A Value, or a number.
Operand = Any


def exp(x: Operand) -> Operand:
    return apply("exp", x)


def log(x: Operand) -> Operand:
    return apply("log", x)


def sqrt(x: Operand) -> Operand:
    return apply("sqrt", x)


def rsqrt(x: Operand) -> Operand:
    return apply("rsqrt", x)


def erf(x: Operand) -> Operand:
    return apply("erf", x)


def minimum(x: Operand, y: Operand) -> Operand:
    """The smaller of x and y; NaN if either is NaN."""
    return apply("minimum", x, y)


def maximum(x: Operand, y: Operand) -> Operand:
    """The larger of x and y; NaN if either is NaN."""
    return apply("maximum", x, y)


def where(condition: Operand, x: Operand, y: Operand) -> Operand:
    """Returns x where the condition is true (not 0), else y."""
    return apply("where", condition, x, y)


def sigmoid(x: Operand) -> Operand:
    return 1.0 / (1.0 + exp(-1.0 * x))  # a product, because bools and unsigned values have no negation


def silu(x: Operand) -> Operand:
    """Returns x * sigmoid(x), with one division."""
    return x / (1.0 + exp(-1.0 * x))


def tanh(x: Operand) -> Operand:
    """Returns tanh(x) from one exponential that cannot overflow. The absolute error is 1e-7 in float32, also for small
    x."""
    e = exp(-2.0 * abs(x))
    y = (1.0 - e) / (1.0 + e)
    return where(x < 0, -y, y)


def clamp(x: Operand, least: Operand, most: Operand) -> Operand:
    return minimum(maximum(x, least), most)
