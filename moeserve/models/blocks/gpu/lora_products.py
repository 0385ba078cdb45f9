"""Launches the terms that the adapters of a step's rows add to the products of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.op import BlockWorkspace
from moeserve.kernels.linear.operands import Gated, RouteBlocks
from moeserve.kernels.lora.op import RANK_TILE, AdapterTable, Items, expand, expand_sum, shrink
from moeserve.models.adapters.scope import AdapterScope, scope_of
from moeserve.models.blocks.gpu.lora import GpuAdapterRows, GpuAdapters
from moeserve.models.blocks.gpu.workspace import GpuWorkspace


class LayerAdapters:
    """One layer's adapters in one step."""

    def __init__(
        self, layer: int, adapters: GpuAdapters, rows: GpuAdapterRows, count: Tensor, s: GpuWorkspace
    ) -> None:
        self._layer = layer
        self._adapters = adapters
        self._rows = rows
        self._count = count
        self._s = s

    def change(self, parts: Sequence[str]) -> bool:
        """Returns whether an adapter of the step's rows may change these products."""
        return scope_of(parts) & self._rows.scope != AdapterScope.NONE

    def add(self, x: GpuActivations, parts: Sequence[str], out: Sequence[Tensor]) -> None:
        """Launches the addition of the adapters' terms for x to `out`: for each of `parts`, its product, [rows,
        width]."""
        table = self._table(parts)
        if table is None:
            return
        assert self._s.adapter_shrunk is not None
        items = Items(self._rows.slots, self._count)
        shrink(x, table, items, self._s.adapter_shrunk)
        expand(self._s.adapter_shrunk, table, items, out)

    def experts(self, parts: Sequence[str]) -> ExpertAdapters | None:
        """Returns the adapters for a mixture's products gate, up and down; None if there are none."""
        gate_up, down = self._table(parts[:2]), self._table(parts[2:])
        if gate_up is None or down is None:
            return None
        assert self._s.adapter_shrunk is not None
        assert self._s.adapter_gate_up is not None
        return ExpertAdapters(
            gate_up,
            down,
            Items(self._rows.slots, self._count),
            self._s.adapter_shrunk,
            self._s.adapter_gate_up,
        )

    def _table(self, parts: Sequence[str]) -> AdapterTable | None:
        if not self.change(parts):
            return None
        return self._adapters.table(self._layer, parts)


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """A step's LoRA adapters for the products of a layer's experts, with scratch memory. `of_routes` completes it with
    the routes."""

    gate_up: AdapterTable
    down: AdapterTable
    items: Items
    shrunk: Tensor
    scratch: Tensor  # flat: the terms of gate and up

    def of_routes(self, ids: Tensor, blocks: BlockWorkspace | None) -> ExpertAdapters:
        """Returns a copy for these routes. ids: int32 [rows, routes], the experts. blocks: the routes sorted by
        expert, for a large batch."""
        top_k = ids.shape[1]
        if blocks is not None and blocks.routes.shape[1] >= RANK_TILE:  # tensor cores need this many rows
            sorted_routes = RouteBlocks(blocks.expert, blocks.routes)
            return replace(self, items=replace(self.items, top_k=top_k, blocks=sorted_routes))
        return replace(self, items=replace(self.items, top_k=top_k, ids=ids))

    def gated(self, y: GpuActivations, width: int, options: Gated) -> Gated:
        """Launches the adapters' terms for gate and up. Returns `options` with these terms as a bias for each
        route."""
        items = self.items
        num = len(items.slots) * items.top_k
        gate, up = self.scratch[: 2 * num * width].view(2, num, width)
        shrink(y, self.gate_up, items, self.shrunk, x_top_k=items.top_k)
        biases = (options.gate_bias, options.up_bias)
        expand(self.shrunk, self.gate_up, items, (gate, up), adds=False, biases=biases)
        return replace(options, gate_bias=gate, up_bias=up, by_route=True)

    def add_down(self, h: GpuActivations, parts: Tensor) -> None:
        """Launches the adapters' part of the down product: adds it to each route's part. parts: [rows, routes, hidden],
        possibly columns of a wider tensor."""
        shrink(h, self.down, self.items, self.shrunk)
        hidden = parts.shape[2]
        expand(self.shrunk, self.down, self.items, [parts[0]], out_top_k=parts.stride(0) // hidden)

    def add_down_sum(self, h: GpuActivations, weights: Tensor, out: Tensor) -> None:
        """Launches the adapters' part of the down product: adds it to each row's weighted sum over its routes. out:
        [rows, hidden]."""
        shrink(h, self.down, self.items, self.shrunk)
        expand_sum(self.shrunk, self.down, self.items, weights, out)
