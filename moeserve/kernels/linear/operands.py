"""Operands of the linear products, as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.gating import OAI_ALPHA, Activation, GatedForm, form_of
from moeserve.quantization import QUANT_TYPES, BlockLayout
from moeserve.quantization.codebook import Codebook


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, or the matrices of several experts, as the arguments that a kernel takes: codes and scales as planes,
    or floats. format: layout of its blocks; None: floats. rows, cols: of one matrix."""

    codes: Tensor  # int32 view; or floats
    scales: Tensor
    supers: Tensor
    format: BlockLayout | Codebook | None
    rows: int
    cols: int


def weight_of(planes: list[Tensor], kind: int, cols: int) -> Weight:
    """Returns the kernel arguments of a matrix. planes: codes, scales, supers of `Planes`, each [experts, rows, ...];
    kind: ggml's number of the weights' type. Raises ValueError for an expert (or matrix) of 2 GiB or more."""
    codes, scales, supers = planes
    rows = codes.shape[1]
    form = QUANT_TYPES[kind].planes_form
    if rows * codes[0, 0].nbytes >= 1 << 31:
        raise ValueError(f"a matrix of {rows} rows of {codes[0, 0].nbytes} bytes is too large: 2 GiB at most")
    return Weight(codes if form is None else codes.view(torch.int32), scales, supers, form, rows, cols)


@dataclass(frozen=True, slots=True)
class RouteBlocks:
    """The routes (pairs of a token and one of its experts) sorted by expert and divided into blocks of one expert each,
    as experts/align.py makes them. Entries that are no route are negative."""

    expert: Tensor  # int32 [blocks]
    routes: Tensor  # int32 [blocks, block]


@dataclass(frozen=True, slots=True)
class Gated:
    """The activation function that joins the products of gate and up, with its parameters; see `activate` in
    experts/reference.py."""

    activation: Activation = "silu"
    gate_bias: Tensor | None = None  # float32 [experts, ff]
    up_bias: Tensor | None = None
    by_route: bool = False  # the biases are [routes, ff], floats: one per route
    limit: float | None = None  # of the activation: kernels/gating.py
    alpha: float = OAI_ALPHA

    @property
    def form(self) -> GatedForm:
        return form_of(self.activation, self.limit, self.alpha)


SILU = Gated()
