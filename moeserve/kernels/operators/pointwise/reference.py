"""Evaluates an expression by torch, one operation after another: the specification of generated kernels, and the
CPU's implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.operators.pointwise.expression import Number
from moeserve.kernels.operators.pointwise.operations import OPERATIONS, Rule
from moeserve.kernels.operators.pointwise.typing_rules import TypedStep


def evaluate(steps: tuple[TypedStep, ...], arguments: tuple[Tensor | Number, ...]) -> Tensor:
    """Evaluates with the dtypes of `typing_rules`: halves as float32, rounded once at the end."""
    device = next((a.device for a in arguments if isinstance(a, Tensor)), None)
    values: list[Tensor] = []
    for typed in steps:
        step = typed.step
        if step.operation in ("argument", "constant"):
            source = arguments[step.constant] if step.operation == "argument" else step.constant  # type: ignore[index]
            value = torch.as_tensor(source, device=device).to(typed.operand_type)
        elif step.operation == "cast":
            value = values[step.operands[0]].to(typed.kind.dtype).to(typed.kind.computed)
        else:
            operation = OPERATIONS[step.operation]
            operands = [values[i] for i in step.operands]
            condition = [operands.pop(0).bool()] if operation.rule is Rule.SELECT else []
            value = operation.torch(*condition, *(x.to(typed.operand_type) for x in operands))
        values.append(value)
    return values[-1].to(steps[-1].kind.dtype)
