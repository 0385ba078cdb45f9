"""Adapters beside the products of a decoder on the CPU pool: the one place of the blocks that knows of them.

A product is `project`, which is the product itself and, where rows of the step ask for adapters, what these add.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.adapters.adapter import Adapter
from moeserve.adapters.products import products_of
from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, LoraTable
from moeserve.kernels.lora.reference import to_panels
from moeserve.kernels.stream_operands import Activations, AdapterRows, ExpertAdapters
from moeserve.models.interface import ModelShape

MOST_TABLES = 4  # of one product over one input


class CpuAdapters:
    """The adapters of a model, numbered in their order. Owns their matrices and the room for what is between two."""

    def __init__(self, shape: ModelShape, adapters: Sequence[Adapter], tokens: int) -> None:
        """tokens: of the largest step. Raises MemoryError."""
        self._held: list[Tensor] = []  # what the tables point into
        self._tables: dict[tuple[int, str], LoraTable] = {}
        for number, adapter in enumerate(adapters):
            for key, pair in adapter.products.items():
                table = self._table(shape, key.layer, key.part, len(adapters))
                a, b = to_panels((torch.from_numpy(pair.a), torch.from_numpy(pair.b)))
                table.set(number, key.expert, a, b)
                self._held += [a, b]
        rank = max((table.most_rank for table in self._tables.values()), default=0)
        self._shrunk = torch.empty(max(MOST_TABLES, 2 * shape.top_k) * tokens * rank)

    def layer(self, index: int, rows: AdapterRows | None) -> LayerAdapters | None:
        """Of a step; None where no row of it asks for an adapter."""
        return None if rows is None else LayerAdapters(index, rows, self._tables, self._shrunk)

    def _table(self, shape: ModelShape, layer: int, part: str, count: int) -> LoraTable:
        table = self._tables.get((layer, part))
        if table is None:
            product = products_of(shape, layer)[part]
            table = LoraTable(product.cols, product.rows, product.experts, count)
            self._tables[layer, part] = table
        return table


class LayerAdapters:
    """Those of one layer in one step."""

    def __init__(
        self, layer: int, rows: AdapterRows, tables: dict[tuple[int, str], LoraTable], shrunk: Tensor
    ) -> None:
        self._layer = layer
        self._rows = rows
        self._tables = tables
        self._shrunk = shrunk

    def add(
        self, stream: CpuStream, x: Activations, n: int, parts: Sequence[str], out: Sequence[Tensor]
    ) -> None:
        """To the products of `parts` over x."""
        tables = [self._tables.get((self._layer, part)) for part in parts]
        if any(table is not None for table in tables):
            stream.lora(x, n, self._rows, tables, list(out[: len(parts)]), self._shrunk)

    def experts(self, parts: Sequence[str]) -> ExpertAdapters | None:
        """For the products of a mixture: gate, up and down."""
        gate, up, down = (self._tables.get((self._layer, part)) for part in parts)
        if gate is None and up is None and down is None:
            return None
        return ExpertAdapters(gate, up, down, self._rows.adapters, self._shrunk)


def project(
    stream: CpuStream,
    x: Activations,
    n: int,
    weights: LinearGroup,
    out: list[Tensor],
    adapters: LayerAdapters | None,
    parts: Sequence[str],
    *,
    add: bool = False,
) -> None:
    """`CpuStream.linear` with what the adapters of `parts`, the first matrices of the group, add."""
    stream.linear(x, n, weights, out, add=add)
    if adapters is not None:
        adapters.add(stream, x, n, parts, out)
