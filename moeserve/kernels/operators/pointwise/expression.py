"""Expressions: the steps by which a Python function computes its result from its arguments.

    expression = trace(lambda gate, up: gate * sigmoid(gate) * up)

The function runs once, on values that record the operations applied to them; equal steps are merged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moeserve.kernels.operators.pointwise.operations import OPERATIONS

Number = bool | int | float


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an expression. operation: one of OPERATIONS, or "argument" (constant: its index), "constant" (its
    value), "cast" (its dtype)."""

    operation: str
    operands: tuple[int, ...]  # numbers of earlier steps
    constant: Number | torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Expression:
    """A traced function. steps: the arguments come first, in order; the last step is the result."""

    name: str
    arguments: tuple[str, ...]
    steps: tuple[Step, ...]


class Value:
    """The values with which an expression's function computes, by Python's operators and `functions.py`."""

    __slots__ = ("_index", "_steps")
    __hash__ = None  # type: ignore[assignment]  # == makes another value

    def __init__(self, steps: dict[tuple[object, ...], Step], index: int) -> None:
        self._steps, self._index = steps, index

    def _then(self, operation: str, *operands: object, constant: torch.dtype | None = None) -> Value:
        steps = self._steps
        return _note(steps, Step(operation, tuple(_index(steps, x) for x in operands), constant))

    def to(self, dtype: torch.dtype) -> Value:
        return self._then("cast", self, constant=dtype)

    def __bool__(self) -> bool:
        raise TypeError("an expression has no branches: use where(condition, value, other)")

    def __pow__(self, exponent: int) -> Value:
        if exponent not in (2, 3, 4):
            raise ValueError(f"** takes 2, 3 or 4 in an expression, not {exponent!r}")
        square = self._then("mul", self, self)
        return square if exponent == 2 else self._then("mul", square, self if exponent == 3 else square)


def _index(steps: dict[tuple[object, ...], Step], x: object) -> int:
    if isinstance(x, Value):
        if x._steps is not steps:
            raise ValueError("a value of another expression")
        return x._index
    if not isinstance(x, (bool, int, float)):
        raise TypeError(f"an expression computes with values and numbers, not {type(x).__name__}")
    return _note(steps, Step("constant", (), x))._index


def _note(steps: dict[tuple[object, ...], Step], step: Step) -> Value:
    # By repr, because 1, 1.0 and True are equal, as are 0.0 and -0.0.
    key = (step.operation, step.operands, repr(step.constant))
    if key not in steps:
        steps[key] = step
    return Value(steps, list(steps).index(key))


def _binary(name: str, *, swapped: bool = False) -> Callable[[Value, object], Value]:
    def method(self: Value, other: object) -> Value:
        return self._then(name, *((other, self) if swapped else (self, other)))

    return method


def _unary(name: str) -> Callable[[Value], Value]:
    return lambda self: self._then(name, self)


for _method, _name in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "and": "and", "or": "or",
                       "xor": "xor"}.items():  # fmt: skip
    setattr(Value, f"__{_method}__", _binary(_name))
    setattr(Value, f"__r{_method}__", _binary(_name, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Value, f"__{_name}__", _binary(_name))
for _name in ("neg", "invert", "abs"):
    setattr(Value, f"__{_name}__", _unary(_name))


def apply(name: str, *operands: Any) -> Any:
    """Returns the value of an operation of OPERATIONS, applied by name. Raises TypeError if no operand is a Value, or
    if there are too many."""
    if len(operands) != OPERATIONS[name].arity:
        raise TypeError(f"{name} takes {OPERATIONS[name].arity} operands, not {len(operands)}")
    for x in operands:
        if isinstance(x, Value):
            return x._then(name, *operands)
    raise TypeError(f"{name} of no value of an expression")


def trace(function: Callable[..., Any]) -> Expression:
    """Returns the expression that `function` computes. Raises TypeError if the result does not come from its
    arguments."""
    names = tuple(inspect.signature(function).parameters)
    steps: dict[tuple[object, ...], Step] = {}
    arguments = [_note(steps, Step("argument", (), i)) for i in range(len(names))]
    result = function(*arguments)
    if not isinstance(result, Value):
        raise TypeError(
            f"{function.__name__} returns {type(result).__name__}, not a value computed from its arguments"
        )
    result_first = list(steps.values())[: result._index + 1]
    return Expression(function.__name__.strip("<>"), names, tuple(result_first))
