"""The dtypes of an expression's steps, by torch's promotion: `torch.result_type` decides, on stand-ins for the
operands.

Torch ranks operands: tensors with dimensions, tensors without, Python numbers. One of a lower rank changes the dtype
only if it is of a higher category (bool, integer, floating-point). Halves are computed in float32 from the first to
the last step, where eager torch rounds each step's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.kernels.operators.pointwise.expression import Expression, Step
from moeserve.kernels.operators.pointwise.operations import OPERATIONS, Rule

NUMBER, ZERO_DIM, DIMENSIONED = range(3)
_NUMBERS = {
    torch.bool: True,
    torch.int64: 1,
    torch.float64: 1.0,
}  # dtypes in which Python numbers are computed


@dataclass(frozen=True, slots=True)
class Kind:
    """The dtype of an argument or a step, and its rank in promotion."""

    dtype: torch.dtype
    rank: int

    @property
    def computed(self) -> torch.dtype:
        return torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype


@dataclass(frozen=True, slots=True)
class TypedStep:
    step: Step
    kind: Kind
    operand_type: torch.dtype  # dtype to which operands are converted, except a condition

    @property
    def value_type(self) -> torch.dtype:
        """The type that its value is computed in."""
        operation = OPERATIONS.get(self.step.operation)
        return torch.bool if operation is not None and operation.rule is Rule.COMPARE else self.operand_type


def kind_of(argument: object) -> Kind:
    """Returns an argument's kind. Raises TypeError for anything but a tensor or a number."""
    if isinstance(argument, torch.Tensor):
        return Kind(argument.dtype, DIMENSIONED if argument.dim() else ZERO_DIM)
    for number, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64)):
        if isinstance(argument, number):
            return Kind(dtype, NUMBER)
    raise TypeError(f"neither a tensor nor a number but {type(argument).__name__}")


def typed(expression: Expression, arguments: tuple[Kind, ...]) -> tuple[TypedStep, ...]:
    """Returns the steps with their dtypes. Raises TypeError if torch has no such operation: bitwise operations on
    floats, a difference of bools."""
    steps: list[TypedStep] = []
    for step in expression.steps:
        operands = [steps[i].kind for i in step.operands]
        steps.append(_typed(step, operands, arguments))
    return tuple(steps)


def _typed(step: Step, operands: list[Kind], arguments: tuple[Kind, ...]) -> TypedStep:
    if step.operation == "argument":
        assert isinstance(step.constant, int)
        kind = arguments[step.constant]
        return TypedStep(step, kind, kind.computed)
    if step.operation == "constant":
        kind = kind_of(step.constant)
        return TypedStep(step, kind, kind.computed)
    if step.operation == "cast":
        assert isinstance(step.constant, torch.dtype)
        kind = Kind(step.constant, max(operands[0].rank, ZERO_DIM))
        return TypedStep(step, kind, kind.computed)
    rule = OPERATIONS[step.operation].rule
    promoted = _promoted(operands[1:] if rule is Rule.SELECT else operands)
    rank = max(k.rank for k in operands)
    if rule is Rule.FLOAT and not promoted.dtype.is_floating_point:
        promoted = Kind(torch.float64 if rank == NUMBER else torch.get_default_dtype(), rank)
    if rule is Rule.BITS and promoted.dtype.is_floating_point:
        raise TypeError(f"{step.operation} of {promoted.dtype}")
    if step.operation in ("sub", "neg") and promoted.dtype == torch.bool:
        raise TypeError(f"{step.operation} of bools: use ^ or ~")
    result = Kind(torch.bool if rule is Rule.COMPARE else promoted.dtype, rank)
    return TypedStep(step, result, promoted.computed)


def _promoted(operands: list[Kind]) -> Kind:
    rank = max(k.rank for k in operands)
    if len(operands) == 1:
        return operands[0]
    first, second = operands
    if rank == NUMBER:
        return max(operands, key=lambda k: list(_NUMBERS).index(k.dtype))
    return Kind(torch.result_type(_stand_in(first), _stand_in(second)), rank)


def _stand_in(kind: Kind) -> torch.Tensor | bool | int | float:
    if kind.rank == NUMBER:
        return _NUMBERS[kind.dtype]
    return torch.empty((1,) * (kind.rank == DIMENSIONED), dtype=kind.dtype, device="meta")
