"""The weights of a tower on its device, and the products with them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.kernels.block_float import PackedMatrix
from moeserve.models.loading.floats import read_floats
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.shape import is_matrix


class InputFormat(Enum):
    """The format of the inputs of a tower's products and attention."""

    FLOAT32 = auto()
    FLOAT16 = auto()
    BFLOAT16 = auto()
    BLOCK_FLOAT = auto()  # block floating point (kernels/block_float.py), on a CPU with AVX-512 VNNI


# Of tensors; block floating point packs them from float32.
_DTYPES: Final = {
    InputFormat.FLOAT32: torch.float32,
    InputFormat.FLOAT16: torch.float16,
    InputFormat.BFLOAT16: torch.bfloat16,
    InputFormat.BLOCK_FLOAT: torch.float32,
}


class TowerWeights:
    """The weights: matrices of products in `dtype`, all others in float32.

    float16 keeps three more bits of a product's inputs than bfloat16. A number beyond its range (65,504) becomes
    infinite; then `widen` makes all later products float32. Numbers in block floating point have float32's range.
    """

    def __init__(
        self, source: TensorSource, names: Iterable[str], device: torch.device, inputs: InputFormat
    ) -> None:
        """Reads all weights, one at a time; for block floating point, the matrices at their first use, so that float32
        and packed weights are never there together. A matrix with numbers beyond the range of `dtype` stays float32."""
        self.device = device
        self.is_block_float = inputs is InputFormat.BLOCK_FLOAT
        self.dtype = _DTYPES[inputs]
        self._source = source
        self._weights: dict[str, Tensor] = {}
        self._packed: dict[str, PackedMatrix] = {}
        # Matrices that are still to be read: until then a packed one would take its size three times.
        self._unread: set[str] = set()
        for name in names:
            if self.is_block_float and is_matrix(name, source.tensors[name].shape):
                self._unread.add(name)
            else:
                self._weights[name] = self._read(name)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._unread:
            self._unread.remove(name)
            self._weights[name] = self._read(name)
        return self._weights[name]

    def pop(self, name: str) -> Tensor:
        """Removes the tensor `name` and returns it."""
        values = self[name]
        del self._weights[name]
        return values

    def reorder(self, name: str, order: Tensor) -> None:
        """Reorders the product `name`: row i of its matrix and bias becomes the former row order[i]."""
        for part in (name + ".weight", name + ".bias"):
            self._weights[part] = self[part][order]

    def join(self, names: list[str], name: str) -> None:
        """Joins several products that have the same input to one product `name`."""
        for part in (".weight", ".bias"):
            self._weights[name + part] = torch.cat([self.pop(each + part) for each in names])

    def transpose(self, name: str) -> None:
        """Transposes the matrix of the product `name`."""
        self._weights[name + ".weight"] = self[name + ".weight"].t().contiguous()

    @property
    def is_narrow(self) -> bool:
        """True if products have inputs of 16 bits."""
        return self.dtype != torch.float32

    def widen(self) -> None:
        """Makes all later products float32. The weights keep the values to which they were rounded."""
        self.dtype = torch.float32

    def product(self, name: str, x: Tensor, *, is_exact: bool = False) -> Tensor:
        """Multiplies x [rows, in], rounded to `dtype`, by the matrix `name`.weight, and adds `name`.bias if the file
        has one. Returns float32 [rows, out]. is_exact: a second product multiplies the part of x that rounding
        removes."""
        bias = self.bias(name)
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

    def wide_product(self, name: str, x: Tensor) -> Tensor:
        """x [rows, in] of `dtype` times the matrix `name`.weight of `dtype`, without a bias. Returns float32 [rows,
        out]."""
        return _wide_product(x, self._weights[name + ".weight"])

    def bias(self, name: str) -> Tensor | None:
        """Returns the bias of the product `name`, float32 [out]."""
        return self._weights.get(name + ".bias")

    def _matrix(self, name: str) -> PackedMatrix:
        """Packs a matrix at its first product, when towers have reordered and joined all of them."""
        found = self._packed.get(name)
        if found is None:
            found = self._packed[name] = PackedMatrix(self.pop(name + ".weight"))
        return found

    def _read(self, name: str) -> Tensor:
        values = read_floats(self._source, name).to(self.device)
        self._source.advise_done(name)
        if is_matrix(name, values.shape) and values.abs().max() <= torch.finfo(self.dtype).max:
            values = values.to(self.dtype)
        return values


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x times the transposed weight, both of 16 bits, accumulated in float32 and not rounded."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())
