"""A matrix in planes. `__init__.py` describes the layout, `moeserve.quantization` each type's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.quantization.quant_type import FIELD, K_BLOCK, SUPER_BLOCK, BlockLayout, QuantType

__all__ = [
    "FIELD",
    "K_BLOCK",
    "QUANT_GROUP",
    "Planes",
    "float_dtype",
    "k_blocks_of",
    "layout_of",
    "supers_of",
]

QUANT_GROUP = 32  # columns that share a scale of int8 activations


@dataclass(frozen=True, slots=True)
class Planes:
    """A matrix [rows, cols] or a stack of `experts` of them, on one device."""

    type: QuantType
    experts: int
    rows: int
    cols: int
    codes: Tensor  # uint8 [experts, rows, parts, k blocks, 16], or floats [experts, rows, cols]
    # int32 [experts, rows, k blocks, words]; empty for floats; for codebook types see books.py.
    scales: Tensor
    supers: Tensor  # int32 [experts, rows, super-blocks]; empty if the type has none; or its codebook, shared

    @property
    def quantised(self) -> bool:
        return self.type.is_quantised

    @property
    def nbytes(self) -> int:
        own = self.codes.nbytes + self.scales.nbytes
        return own if self.type.plane_book is not None else own + self.supers.nbytes


def layout_of(kind: QuantType) -> BlockLayout:
    """Returns the block layout of a quantised type. Raises ValueError for a float type."""
    if kind.layout is None:
        raise ValueError(f"{kind.name} is not quantised")
    return kind.layout


def float_dtype(kind: QuantType) -> torch.dtype:
    """Returns the dtype of a float type. Raises ValueError for a quantised one."""
    if kind.is_quantised:
        raise ValueError(f"{kind.name} is quantised")
    dtype: torch.dtype = getattr(torch, kind.float_name)
    return dtype


def k_blocks_of(cols: int) -> int:
    return -(-cols // K_BLOCK)


def supers_of(cols: int) -> int:
    return -(-cols // SUPER_BLOCK)
