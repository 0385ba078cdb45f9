"""Describes a step's buffers as data, and the region of GPU memory that holds them. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int8": 1, "uint8": 1}
GpuFloat = Literal["float32", "float16", "bfloat16"]

ALIGNMENT = 256  # bytes; every buffer in a GPU's arena begins at a multiple
INT8_GROUP = 32  # columns that share a scale of int8 activations


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


def activation_buffers(name: str, rows: int, cols: int, dtype: str, *, quantised: bool) -> list[Buffer]:
    """Returns the descriptions (names, shapes, dtypes) of the buffers of activations [rows, cols] of this dtype;
    allocates no memory. quantised: whether the activations are also stored as int8 with scales."""
    buffers = [Buffer(name, (rows, cols), dtype)]
    if quantised:
        buffers.append(Buffer(f"{name}_codes", (rows, cols), "int8"))
        buffers.append(Buffer(f"{name}_scales", (rows, cols // INT8_GROUP)))
    return buffers


def arena_bytes(buffers: Iterable[Buffer]) -> int:
    """Returns the bytes of a region that holds the buffers one after another, each aligned."""
    return sum(-(-buffer.nbytes // ALIGNMENT) * ALIGNMENT for buffer in buffers)
