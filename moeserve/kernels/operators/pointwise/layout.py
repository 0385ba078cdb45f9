"""The memory layout of a pointwise operation's tensors: broadcast, with the fewest dimensions that their strides
allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The common iteration space, outermost dimension first. Without dimensions: one element."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]  # per tensor; 0 where it is broadcast

    @property
    def is_wide(self) -> bool:
        """True if some tensor's last element is 2**31 or more elements after its first."""
        return any(
            sum((n - 1) * s for n, s in zip(self.sizes, of, strict=True)) >= 2**31 for of in self.strides
        )


def result_strides(shape: torch.Size, tensors: list[Tensor]) -> tuple[int, ...]:
    """Returns the strides, in elements, for a result of this shape: those of the tensors that have the shape, if all
    have the same strides without gaps; else contiguous ones. Tensors that are broadcast do not count."""
    full = {t.stride() for t in tensors if t.shape == shape}
    if len(full) == 1:
        (strides,) = full
        if _is_dense(shape, strides):
            return strides
    return torch.empty(shape, device="meta").stride()


def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def collapse(shape: torch.Size, strides: list[tuple[int, ...]]) -> Layout:
    """Returns the layout of tensors with these strides (the result's first), each expanded to `shape`, which is not
    empty.

    Dimensions are ordered by the result's strides. Dimensions of size 1 are dropped. Neighbouring dimensions are merged
    if every tensor steps evenly from one to the next. The last dimension is one along which the result is contiguous,
    if any. The one before it is one along which another tensor is contiguous, else the longest.
    """
    order = sorted(
        (d for d, size in enumerate(shape) if size != 1), key=lambda d: (strides[0][d], -d), reverse=True
    )
    sizes: list[int] = []
    columns: list[list[int]] = []  # the strides of each dimension
    for d in order:
        column = [of[d] for of in strides]
        merges = bool(columns) and all(
            outer == inner * shape[d] for outer, inner in zip(columns[-1], column, strict=True)
        )
        if merges:
            sizes[-1] *= shape[d]
            columns[-1] = column
        else:
            sizes.append(shape[d])
            columns.append(column)
    if len(sizes) > 2:
        *outer, last = range(len(sizes))
        row = max(outer, key=lambda d: (1 in columns[d], sizes[d]))
        kept = [d for d in outer if d != row]
        sizes, columns = ([some[d] for d in (*kept, row, last)] for some in (sizes, columns))  # type: ignore[assignment]
    return Layout(tuple(sizes), tuple(tuple(c[i] for c in columns) for i in range(len(strides))))


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def tile(sizes: tuple[int, ...], elements: int) -> tuple[int, int]:
    """Returns a program's rows and columns along the last two dimensions: powers of two with about `elements`
    elements in all."""
    if len(sizes) < 2:
        return 1, elements
    columns = min(power_of_two(sizes[-1]), elements)
    rows = min(power_of_two(sizes[-2]), elements // columns)
    # Tensors that are not contiguous along columns may be so along rows, so both sides of the tile should be long.
    while columns > 64 and rows * 2 <= min(power_of_two(sizes[-2]), 16):
        columns, rows = columns // 2, rows * 2
    return rows, columns


def num_tiles(sizes: tuple[int, ...], rows: int, columns: int) -> int:
    """Returns the number of programs of a launch."""
    if len(sizes) < 2:
        return -(-math.prod(sizes) // columns)
    return -(-sizes[-1] // columns) * -(-sizes[-2] // rows) * math.prod(sizes[:-2])
