"""The operations of expressions: one table, read by the code generator, by torch's evaluation and by the type
rules."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Rule(enum.Enum):
    """The rule for a result's dtype. The operands are always converted to one common dtype first."""

    SAME = enum.auto()  # the promoted dtype
    FLOAT = enum.auto()  # the promoted dtype if it is floating-point, else torch's default dtype
    BITS = enum.auto()  # the promoted dtype; it must not be floating-point
    COMPARE = enum.auto()  # bool
    SELECT = enum.auto()  # the first operand is a condition; the promoted dtype of the others


@dataclass(frozen=True, slots=True)
class Operation:
    arity: int
    rule: Rule
    triton: str  # with {0}, {1}, {2} for the operands, which are variables of one dtype
    torch: Callable[..., Any]


def _nan_safe(name: str) -> str:
    """Returns Triton code of a minimum or maximum that keeps NaN like torch's; Triton's own drops it."""
    return f"tl.{name}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)"


OPERATIONS = {
    "add": Operation(2, Rule.SAME, "{0} + {1}", torch.add),
    "sub": Operation(2, Rule.SAME, "{0} - {1}", torch.sub),
    "mul": Operation(2, Rule.SAME, "{0} * {1}", torch.mul),
    "minimum": Operation(2, Rule.SAME, _nan_safe("minimum"), torch.minimum),
    "maximum": Operation(2, Rule.SAME, _nan_safe("maximum"), torch.maximum),
    "neg": Operation(1, Rule.SAME, "-{0}", torch.neg),
    "abs": Operation(1, Rule.SAME, "tl.abs({0})", torch.abs),
    "div": Operation(2, Rule.FLOAT, "{0} / {1}", torch.div),
    "exp": Operation(1, Rule.FLOAT, "tl.exp({0})", torch.exp),
    "log": Operation(1, Rule.FLOAT, "tl.log({0})", torch.log),
    "sqrt": Operation(1, Rule.FLOAT, "tl.sqrt({0})", torch.sqrt),
    "rsqrt": Operation(1, Rule.FLOAT, "tl.rsqrt({0})", torch.rsqrt),
    "erf": Operation(1, Rule.FLOAT, "tl.erf({0})", torch.erf),
    "and": Operation(2, Rule.BITS, "{0} & {1}", operator.and_),
    "or": Operation(2, Rule.BITS, "{0} | {1}", operator.or_),
    "xor": Operation(2, Rule.BITS, "{0} ^ {1}", operator.xor),
    "invert": Operation(1, Rule.BITS, "~{0}", operator.invert),
    "eq": Operation(2, Rule.COMPARE, "{0} == {1}", torch.eq),
    "ne": Operation(2, Rule.COMPARE, "{0} != {1}", torch.ne),
    "lt": Operation(2, Rule.COMPARE, "{0} < {1}", torch.lt),
    "le": Operation(2, Rule.COMPARE, "{0} <= {1}", torch.le),
    "gt": Operation(2, Rule.COMPARE, "{0} > {1}", torch.gt),
    "ge": Operation(2, Rule.COMPARE, "{0} >= {1}", torch.ge),
    "where": Operation(3, Rule.SELECT, "tl.where({0}, {1}, {2})", torch.where),
}
