"""Generates a kernel's source: Triton code of an expression for one kind of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moeserve.kernels.operators.pointwise.expression import Expression
from moeserve.kernels.operators.pointwise.operations import OPERATIONS, Rule
from moeserve.kernels.operators.pointwise.typing_rules import NUMBER, Kind, TypedStep, typed

TRITON_TYPES = {
    torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.int16: "tl.int16",
    torch.int32: "tl.int32", torch.int64: "tl.int64", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32", torch.float64: "tl.float64",
}  # fmt: skip
NUMBER_TYPES = {torch.bool: "i64", torch.int64: "i64", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True)
class KernelKind:
    """Everything that the source depends on, besides the expression.

    steps: for each tensor, its step along each dimension: "0" broadcast, "1" contiguous, "s" any other; the result
    first, then the arguments, "" for a number.
    """

    arguments: tuple[Kind, ...]
    steps: tuple[str, ...]
    wide: bool  # 64-bit indices

    @property
    def dims(self) -> int:
        return len(self.steps[0])


def kernel_source(name: str, expression: Expression, kind: KernelKind) -> str:
    """Returns a module with the function `name`, which is not yet a Triton kernel.

    Its parameters: out, the arguments, the size of each dimension, the strides marked "s" in the order of `steps`,
    and a tile's ROWS and COLUMNS.
    """
    body = [*_indices(kind), *_loads(expression, kind)]
    values = typed(expression, kind.arguments)
    body += _compute(values, [f"x{i}" for i in range(len(kind.arguments))])
    address, live = _access(kind, 0, "out")
    body.append(f"tl.store({address}, t{len(values) - 1}.to(out.dtype.element_ty), {live})")
    head = f"def {name}({', '.join(_parameters(kind))}):"
    return "\n".join(["import triton.language as tl", "", "", head, *(f"    {line}" for line in body), ""])


def stride_names(kind: KernelKind) -> list[tuple[int, int, str]]:
    """Returns (tensor, dimension, name) for each stride that the kernel takes; tensor 0 is the result."""
    return [
        (i, d, f"stride{i}_{d}")
        for i, steps in enumerate(kind.steps)
        for d, step in enumerate(steps)
        if step == "s"
    ]


def _parameters(kind: KernelKind) -> Iterator[str]:
    yield "out"
    for i, argument in enumerate(kind.arguments):
        yield f'x{i}: "{NUMBER_TYPES[argument.dtype]}"' if argument.rank == NUMBER else f"x{i}"
    yield from (f"size{d}" for d in range(kind.dims))
    yield from (name for _, _, name in stride_names(kind))
    yield from ("ROWS: tl.constexpr", "COLUMNS: tl.constexpr")


def _indices(kind: KernelKind) -> Iterator[str]:
    """Yields code for the tile's indices: r and c along the last two dimensions, i0 .. along the others."""
    wide = ".to(tl.int64)" if kind.wide else ""
    yield f"program = tl.program_id(0){wide}"
    if kind.dims == 0:
        yield "c = program * COLUMNS + tl.arange(0, COLUMNS)"
        yield "live = c < 1"
        return
    last = kind.dims - 1
    if kind.dims == 1:
        yield "c = program * COLUMNS + tl.arange(0, COLUMNS)"
        yield "live = c < size0"
        return
    yield f"tiles = tl.cdiv(size{last}, COLUMNS)"
    yield "c = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)"
    yield "program = program // tiles"
    yield f"tiles = tl.cdiv(size{last - 1}, ROWS)"
    yield "r = (program % tiles) * ROWS + tl.arange(0, ROWS)"
    yield "program = program // tiles"
    for d in reversed(range(kind.dims - 2)):
        yield f"i{d} = program % size{d}"
        yield f"program = program // size{d}"
    yield f"live_c = (c < size{last})[None, :]"
    yield f"live_r = (r < size{last - 1})[:, None]"
    yield "live = live_r & live_c"


def _access(kind: KernelKind, tensor: int, name: str) -> tuple[str, str | None]:
    """Returns a tensor's addresses in the tile and their mask: one row, column or element if it is broadcast."""
    steps = kind.steps[tensor]
    if kind.dims == 0:
        return (f"{name} + c", "live") if tensor == 0 else (name, None)
    index = [f"i{d}" for d in range(kind.dims - 2)] + (
        ["c"] if kind.dims == 1 else ["r[:, None]", "c[None, :]"]
    )
    terms = [name]
    for d, step in enumerate(steps):
        if step != "0":
            terms.append(index[d] + (f" * stride{tensor}_{d}" if step == "s" else ""))
    within = steps[-2:]
    if "0" not in within:
        live = "live"
    elif "1" in within or "s" in within:
        live = "live_c" if within[0] == "0" else "live_r"
    else:
        live = None
    return " + ".join(terms), live


def _loads(expression: Expression, kind: KernelKind) -> Iterator[str]:
    for i, argument in enumerate(kind.arguments):
        if argument.rank == NUMBER:
            yield f"x{i} = tl.full([], x{i}, {TRITON_TYPES[argument.dtype]})"
            continue
        address, live = _access(kind, i + 1, f"x{i}")
        yield f"x{i} = tl.load({address})" if live is None else f"x{i} = tl.load({address}, {live})"


def _compute(steps: tuple[TypedStep, ...], arguments: list[str]) -> Iterator[str]:
    """Yields code that assigns t0, t1, ... in the steps' dtypes; constants are inlined."""
    for i, typed_step in enumerate(steps):
        step = typed_step.step
        if step.operation == "argument":
            assert isinstance(step.constant, int)
            yield f"t{i} = " + _converted(
                arguments[step.constant], typed_step.kind.dtype, typed_step.operand_type
            )
        elif step.operation == "cast":
            yield f"t{i} = {_operand(steps, step.operands[0], typed_step.kind.dtype)}"
            if typed_step.operand_type != typed_step.kind.dtype:
                yield f"t{i} = t{i}.to({TRITON_TYPES[typed_step.operand_type]})"
        elif step.operation != "constant":
            yield f"t{i} = {_operation(steps, typed_step)}"


def _operation(steps: tuple[TypedStep, ...], typed_step: TypedStep) -> str:
    operation, dtype = OPERATIONS[typed_step.step.operation], typed_step.operand_type
    operands = list(typed_step.step.operands)
    condition = [_operand(steps, operands.pop(0), torch.bool)] if operation.rule is Rule.SELECT else []
    if dtype == torch.bool and operation.rule is Rule.SAME:
        # Sums and products of one-bit values would wrap.
        return f"({operation.triton.format(*(_operand(steps, k, torch.int32) for k in operands))}) != 0"
    return operation.triton.format(*condition, *(_operand(steps, k, dtype) for k in operands))


def _operand(steps: tuple[TypedStep, ...], index: int, dtype: torch.dtype) -> str:
    """Returns code of an earlier step's value as `dtype`."""
    typed_step = steps[index]
    if typed_step.step.operation == "constant":
        return f"tl.full([], {_literal(typed_step.step.constant, dtype)}, {TRITON_TYPES[dtype]})"
    return _converted(f"t{index}", typed_step.value_type, dtype)


def _converted(name: str, source: torch.dtype, dtype: torch.dtype) -> str:
    if source == dtype:
        return name
    return f"({name} != 0)" if dtype == torch.bool else f"{name}.to({TRITON_TYPES[dtype]})"


def _literal(value: Any, dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        return repr(bool(value) if dtype == torch.bool else int(value))
    return repr(float(value)) if abs(value) < float("inf") else f'float("{value}")'
