"""The weights of a tower on its device, and the products with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.kernels.block_float import PackedMatrix
from moeserve.models.loading.floats import read_floats
from moeserve.models.sources.source import TensorSource

# Tables whose rows are looked up; they are not matrices of products.
_TABLES: Final = ("v.position_embd.weight",)
# Stands for block floating point (kernels/block_float.py), which has int16 codes.
BLOCK_FLOAT: Final = torch.int16


class TowerWeights:
    """The weights: matrices of products in `dtype`, all others in float32.

    float16 keeps three more bits of a product's inputs than bfloat16. A number beyond its range (65,504) becomes
    infinite; then `widen` makes all later products float32. Numbers in block floating point have float32's range.
    """

    def __init__(
        self, source: TensorSource, names: Iterable[str], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Reads all weights, one at a time. A matrix with numbers beyond the range of `dtype` stays float32. dtype:
        type of products' inputs; BLOCK_FLOAT: on the CPU, where there is AVX-512 VNNI."""
        self.device = device
        self.is_block_float = dtype == BLOCK_FLOAT
        self.dtype = torch.float32 if self.is_block_float else dtype
        self._weights: dict[str, Tensor] = {}
        self._packed: dict[str, PackedMatrix] = {}  # in block floating point, from their first product on
        for name in names:
            values = read_floats(source, name).to(device)
            is_matrix = values.dim() == 2 and name not in _TABLES
            if is_matrix and values.abs().max() <= torch.finfo(self.dtype).max:
                values = values.to(self.dtype)
            self._weights[name] = values

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def pop(self, name: str) -> Tensor:
        return self._weights.pop(name)

    def reorder(self, name: str, order: Tensor) -> None:
        """Reorders the product `name`: row i of its matrix and bias becomes the former row order[i]."""
        for part in (name + ".weight", name + ".bias"):
            self._weights[part] = self._weights[part][order]

    def join(self, names: list[str], name: str) -> None:
        """Joins several products that have the same input to one product `name`."""
        for part in (".weight", ".bias"):
            self._weights[name + part] = torch.cat([self._weights.pop(each + part) for each in names])

    @property
    def is_narrow(self) -> bool:
        """True if products have inputs of 16 bits."""
        return self.dtype != torch.float32

    def widen(self) -> None:
        """Makes all later products float32. The weights keep the values to which they were rounded."""
        self.dtype = torch.float32

    def product(self, name: str, x: Tensor, *, is_exact: bool = False) -> Tensor:
        """x [rows, in], rounded to `dtype`, times the matrix `name`.weight, plus `name`.bias if there is one. Returns
        float32 [rows, out]. is_exact: a second product multiplies the part of x that rounding removes."""
        bias = self._weights.get(name + ".bias")
        if self.is_block_float:
            return self._matrix(name).product(x, bias)
        weight = self._weights[name + ".weight"]
        if not self.is_narrow or weight.dtype == torch.float32:
            return functional.linear(x, weight.float(), bias)
        rounded = x.to(self.dtype)
        out = _wide_product(rounded, weight)
        if is_exact:
            rest = torch.sub(x, rounded, out=torch.empty_like(rounded))
            out += _wide_product(rest, weight)
        return out if bias is None else out.add_(bias)

    def _matrix(self, name: str) -> PackedMatrix:
        """Packs a matrix at its first product, when towers have reordered and joined all of them."""
        found = self._packed.get(name)
        if found is None:
            found = self._packed[name] = PackedMatrix(self._weights.pop(name + ".weight"))
        return found


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x times the transposed weight, both of 16 bits, accumulated in float32 and not rounded."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())
