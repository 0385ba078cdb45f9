"""LoRA adapters for the products of a decoder on the CPU pool. No other block handles adapters.

`project` computes a product and, for rows with adapters, adds the adapters' terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, LoraTable
from moeserve.kernels.lora.reference import Pair, to_panels
from moeserve.kernels.stream_operands import Activations, AdapterRows, ExpertAdapters
from moeserve.models.adapters.adapter import FLOAT32_BYTES, Adapter, ProductKey
from moeserve.models.adapters.products import products_of
from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.adapters.sizes import workspace_bytes
from moeserve.models.interface import ModelShape


@dataclass(frozen=True, slots=True)
class AdapterPanels:
    """An adapter in the CPU kernels' layout."""

    products: dict[ProductKey, Pair]

    @staticmethod
    def of(adapter: Adapter) -> AdapterPanels:
        """Converts an adapter. Raises MemoryError."""
        return AdapterPanels(
            {
                key: to_panels((torch.from_numpy(pair.a), torch.from_numpy(pair.b)))
                for key, pair in adapter.products.items()
            }
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for pair in self.products.values() for part in pair)

    @property
    def rank(self) -> int:
        """The largest rank, rounded up to a size that the kernels take."""
        return max(len(a) for a, _ in self.products.values())


class CpuAdapters:
    """The adapters of a model, by number. Owns the adapters' matrices and the buffer of intermediate vectors."""

    def __init__(
        self, shape: ModelShape, adapters: Sequence[Adapter], tokens: int, capacity: int | None = None
    ) -> None:
        """adapters: the first adapters, which get the numbers from 0 on. tokens: rows of the largest step. capacity:
        maximum number of adapters at once (default: as many as `adapters`). Raises MemoryError."""
        self.shape = shape
        self.capacity = len(adapters) if capacity is None else capacity
        self._tokens = tokens
        self._held: dict[int, AdapterPanels] = {}  # keeps the memory alive that the tables point to
        self._tables: dict[tuple[int, str], LoraTable] = {}
        self._shrunk = torch.empty(0)
        for number, adapter in enumerate(adapters):
            self.put(number, AdapterPanels.of(adapter))

    def check(self, checked: PeftAdapter | GgufAdapter) -> None:
        """Does nothing: the CPU engine accepts every adapter that fits the model."""

    def needed_bytes(self, checked: PeftAdapter | GgufAdapter) -> int:
        """Returns the bytes of RAM needed while the adapter is read: for the file's matrices and for those in the
        kernels' layout."""
        return 2 * checked.nbytes

    def held_bytes(self, panels: AdapterPanels) -> int:
        """Returns the bytes of RAM of the adapter's matrices and intermediate vectors."""
        return panels.num_bytes + self._workspace_bytes(panels.rank)

    def prepare(self, adapter: Adapter) -> AdapterPanels:
        """Converts an adapter. Called on another thread while steps run. Raises MemoryError."""
        return AdapterPanels.of(adapter)

    def _workspace_bytes(self, rank: int) -> int:
        return workspace_bytes(self.shape, self._tokens, rank)

    def put(self, number: int, panels: AdapterPanels) -> None:
        """Installs an adapter. May be called only between two steps. Raises MemoryError."""
        self._held[number] = panels
        for key, (a, b) in panels.products.items():
            self._table(key.layer, key.part).set(number, key.expert, a, b)
        rank = max((table.most_rank for table in self._tables.values()), default=0)
        floats = self._workspace_bytes(rank) // FLOAT32_BYTES
        if len(self._shrunk) < floats:
            self._shrunk = torch.empty(floats)

    def remove(self, number: int) -> None:
        """Removes an adapter. May be called only between two steps, when no row uses the adapter any more."""
        for key in self._held.pop(number).products:
            self._table(key.layer, key.part).set(number, key.expert, None, None)

    def layer(self, index: int, rows: AdapterRows | None) -> LayerAdapters | None:
        """Returns a layer's adapters for the step; None if no row uses one. index: of the layer, from 0."""
        return None if rows is None else LayerAdapters(index, rows, self._tables, self._shrunk)

    def _table(self, layer: int, part: str) -> LoraTable:
        table = self._tables.get((layer, part))
        if table is None:
            product = products_of(self.shape, layer)[part]
            table = LoraTable(product.cols, product.rows, product.experts, self.capacity)
            self._tables[layer, part] = table
        return table


class LayerAdapters:
    """One layer's adapters in one step."""

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
        """Launches out[i] += B A x of each row's adapter, for the products named `parts` of x. out: float32 [n, rows of
        the part]; n: rows of the step."""
        tables = [self._tables.get((self._layer, part)) for part in parts]
        if any(table is not None for table in tables):
            stream.lora(x, n, self._rows, tables, list(out[: len(parts)]), self._shrunk)

    def experts(self, parts: Sequence[str]) -> ExpertAdapters | None:
        """Returns the adapters for a mixture's products gate, up and down; None if there are none."""
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
    """Launches `CpuStream.linear`: out = W x, or (add) out += W x, for a group of matrices; then adds the adapters'
    terms for `parts`, the names of the group's first matrices. n: rows of the step."""
    stream.linear(x, n, weights, out, add=add)
    if adapters is not None:
        adapters.add(stream, x, n, parts, out)
