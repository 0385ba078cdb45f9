"""The weights of a tower on its device, and the products with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.loading.floats import read_floats
from moeserve.models.sources.source import TensorSource

# Tables whose rows are looked up; they are not matrices of products.
_TABLES: Final = ("v.position_embd.weight",)


class TowerWeights:
    """The weights: matrices of products in `dtype`, all others in float32.

    float16 keeps three more bits of a product's inputs than bfloat16. A number beyond its range (65,504) becomes
    infinite; then `widen` makes all later products float32.
    """

    def __init__(
        self, source: TensorSource, names: Iterable[str], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Reads all weights, one at a time. A matrix with numbers beyond the range of `dtype` stays float32."""
        self.device = device
        self.dtype = dtype  # the type of products' inputs
        self._weights: dict[str, Tensor] = {}
        for name in names:
            values = read_floats(source, name).to(device)
            is_matrix = values.dim() == 2 and name not in _TABLES
            if is_matrix and values.abs().max() <= torch.finfo(dtype).max:
                values = values.to(dtype)
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
        weight, bias = self._weights[name + ".weight"], self._weights.get(name + ".bias")
        if not self.is_narrow or weight.dtype == torch.float32:
            return functional.linear(x, weight.float(), bias)
        rounded = x.to(self.dtype)
        out = _wide_product(rounded, weight)
        if is_exact:
            rest = torch.sub(x, rounded, out=torch.empty_like(rounded))
            out += _wide_product(rest, weight)
        return out if bias is None else out.add_(bias)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x times the transposed weight, both of 16 bits, accumulated in float32 and not rounded."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())
