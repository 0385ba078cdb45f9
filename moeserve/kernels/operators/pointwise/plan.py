"""The plan of an expression's call: checked arguments, layout, and a description of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.operators.pointwise.expression import Expression, Number
from moeserve.kernels.operators.pointwise.layout import collapse, num_tiles, result_strides, tile
from moeserve.kernels.operators.pointwise.source import TRITON_TYPES, KernelKind, stride_names
from moeserve.kernels.operators.pointwise.typing_rules import TypedStep, kind_of, typed

ELEMENTS = 1024  # per program

Argument = Tensor | Number


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of all calls with arguments of the same shapes, strides, types and alignments."""

    shape: torch.Size
    strides: tuple[int, ...]  # of a result allocated by the call
    dtype: torch.dtype
    device: torch.device
    kind: KernelKind
    grid: tuple[int]
    rest: tuple[int, ...]  # further kernel arguments, after the call's own
    has_bools: bool  # number arguments include bools, which Triton takes as integers

    def compiled_key(self, out: Tensor, arguments: tuple[Argument, ...]) -> tuple[object, ...]:
        """Returns the key under which a compiled kernel is cached: the result's dtype, whether each tensor begins at a
        multiple of 16 bytes, and whether each size and stride is 1, a multiple of 16, or too large for 32 bits."""
        aligned = [t.data_ptr() % 16 == 0 for t in (out, *arguments) if isinstance(t, Tensor)]
        *sizes, rows, columns = self.rest
        classes = [(v == 1, v % 16 == 0, v >= 2**31) for v in sizes]
        return (out.dtype, *aligned, *classes, rows, columns)


def checked(
    expression: Expression, arguments: tuple[Argument, ...], out: Tensor | None
) -> tuple[tuple[TypedStep, ...], torch.Size]:
    """Returns the expression's steps with their dtypes, and the broadcast shape of its result. Raises TypeError for a
    wrong number or kind of arguments or an `out` of another dtype, ValueError for shapes that do not fit."""
    name = expression.name
    if len(arguments) != len(expression.arguments):
        raise TypeError(f"{name} takes {', '.join(expression.arguments)}: not {len(arguments)} arguments")
    steps = typed(expression, tuple(kind_of(a) for a in arguments))
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    if not tensors:
        raise TypeError(f"{name} of no tensor")
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError as error:
        raise ValueError(f"shapes do not broadcast: {[tuple(t.shape) for t in tensors]}") from error
    if out is not None:
        if not torch.can_cast(steps[-1].kind.dtype, out.dtype):
            raise TypeError(f"a result of {steps[-1].kind.dtype} does not go into {out.dtype}")
        if shape != out.shape:
            raise ValueError(f"a result of shape {tuple(shape)} does not go into {tuple(out.shape)}")
    for t in tensors if out is None else (*tensors, out):
        if t.device != tensors[0].device:
            raise ValueError(f"tensors on {t.device} and on {tensors[0].device}")
        if t.dtype not in TRITON_TYPES:
            raise TypeError(f"{name} of {t.dtype}")
        if t.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} has no gradient: call it under torch.no_grad()")
    return steps, shape


def plan_of(expression: Expression, arguments: tuple[Argument, ...], out: Tensor | None) -> Plan:
    """Returns a call's plan: result, layout, grid and kernel arguments. Raises TypeError and ValueError as `checked`. A
    result without elements has a grid of 0 programs."""
    steps, shape = checked(expression, arguments, out)
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    strides = result_strides(shape, tensors) if out is None else out.stride()
    layout = collapse(shape, [strides, *(t.expand(shape).stride() for t in tensors)])
    of_tensors = iter(layout.strides)
    by_argument = [next(of_tensors), *(next(of_tensors) if isinstance(a, Tensor) else () for a in arguments)]
    kind = KernelKind(
        tuple(kind_of(a) for a in arguments),
        tuple("".join({0: "0", 1: "1"}.get(s, "s") for s in of) for of in by_argument),
        layout.is_wide,
    )
    values = [by_argument[i][d] for i, d, _ in stride_names(kind)]
    rows, columns = tile(layout.sizes, ELEMENTS)
    grid = num_tiles(layout.sizes, rows, columns) if shape.numel() else 0
    return Plan(
        shape, strides, steps[-1].kind.dtype, tensors[0].device, kind, (grid,),
        (*layout.sizes, *values, rows, columns), any(isinstance(a, bool) for a in arguments),
    )  # fmt: skip
