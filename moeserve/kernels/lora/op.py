"""Launches the adapters' products on a GPU: first A x for all parts of a product group ("shrink"), then B times that
("expand")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.launch import next_power_of_2, pdl, row_stride
from moeserve.kernels.linear.operands import RouteBlocks
from moeserve.kernels.lora.small_batch import expand_small_batch_kernel, shrink_small_batch_kernel
from moeserve.kernels.lora.triton import expand_kernel, expand_sum_kernel, shrink_kernel

ROWS_BY_THEMSELVES = 64  # steps with up to this many rows process each row by itself; larger ones use blocks
BLOCK = 64
RANK_TILE = 16
# Ranks that a small-batch program multiplies at once, held in registers.
RANKS_OF_PROGRAM = 2
COLS_OF_PROGRAM = 4096
_ENTRY = 4  # int64s per product of an adapter
_FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """The adapters' matrices for the products of one launch, for all adapter slots: `parts` consecutive products, each
    of `experts` matrices with `cols` columns. entries hold addresses of A and B and their rank; 0: the adapter has
    none."""

    entries: Tensor  # int64 [slots, parts * experts, 4], a view of all products'; see triton.py
    parts: int
    experts: int
    cols: int
    rank: int  # largest rank of an adapter
    dtype: torch.dtype  # of the matrices

    @property
    def slot_stride(self) -> int:
        return int(self.entries.stride(0))

    @property
    def float(self) -> tl.dtype:
        return _FLOATS[self.dtype]


@dataclass(frozen=True, slots=True)
class Items:
    """What a LoRA launch multiplies: a step's rows, or their routes to experts, each with the adapter that it uses."""

    slots: Tensor  # int32 [n]: each row's adapter, -1 for none
    count: Tensor  # int32 [1]: rows that exist
    top_k: int = 1
    # int32 [n, top_k], experts, negative: no route; may be columns of a wider tensor.
    ids: Tensor | None = None
    blocks: RouteBlocks | None = None  # sorted routes, for a large batch

    def tiling(self) -> tuple[int, int]:
        """Returns (items per block, number of blocks)."""
        if self.blocks is not None:
            return self.blocks.routes.shape[1], len(self.blocks.expert)
        items = len(self.slots) * self.top_k
        block = 1 if self.ids is not None or len(self.slots) <= ROWS_BY_THEMSELVES else BLOCK
        return block, -(-items // block)

    def operands(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Returns the kernels' tensor arguments (ids, block_expert, block_routes, count); None for those that do not
        apply."""
        if self.blocks is not None:
            return None, self.blocks.expert, self.blocks.routes, self.count
        return self.ids, None, None, self.count

    @property
    def uses_small_batch(self) -> bool:
        """True if each row is processed by itself (small_batch.py)."""
        return self.ids is None and self.tiling()[0] == 1

    @property
    def ids_stride(self) -> int:
        return 0 if self.ids is None else row_stride(self.ids)


def shrink(x: GpuActivations, table: AdapterTable, items: Items, shrunk: Tensor, *, x_top_k: int = 1) -> None:
    """Computes shrunk[item, part] = A x[item // x_top_k]. x: its int8 form is used if it has no floats and rows are
    processed singly. shrunk: float32, flat, with space for [items, table.parts, table.rank]."""
    if items.uses_small_batch and x.x is not None and x_top_k == 1:
        _shrink_small_batch(x.x, table, items, shrunk)
        return
    block, blocks = items.tiling()
    is_row = block == 1
    shrink_kernel(
        (min(4, table.rank // RANK_TILE) if is_row else 1, table.parts, blocks),
        x.x,
        x.codes if x.x is None else None,
        x.scales if x.x is None else None,
        items.slots,
        table.entries,
        *items.operands(),
        shrunk,
        table.cols,
        table.cols if x.x is None else row_stride(x.x),
        x_top_k,
        table.parts,
        table.experts,
        table.slot_stride,
        items.top_k,
        items.ids_stride,
        table.rank,
        table.float,
        block,
        RANK_TILE // 4 if is_row else RANK_TILE,
        min(next_power_of_2(table.cols), 512 if is_row else 64),
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


def expand(
    shrunk: Tensor,
    table: AdapterTable,
    items: Items,
    out: Sequence[Tensor],
    *,
    adds: bool = True,
    biases: Sequence[Tensor | None] = (None, None),
    out_top_k: int | None = None,
) -> None:
    """Computes out[part][item] += B shrunk[item, part], for each of at most 3 parts. adds=False: assigns instead, 0
    for items without adapters, plus bias float32 [experts, rows] for the first two parts. out: [items, rows] each;
    with out_top_k [n * out_top_k, rows], of which each row's first top_k entries are its items."""
    if items.uses_small_batch and adds:
        _expand_small_batch(shrunk, table, items, out)
        return
    block, blocks = items.tiling()
    bn = 128 if block == 1 else 64
    outs = [*out, None, None][:3]
    widths = [0 if o is None else o.shape[1] for o in outs]
    strides = [0 if o is None else row_stride(o) for o in outs]
    expand_kernel(
        (sum(-(-width // bn) for width in widths), blocks),
        shrunk,
        items.slots,
        table.entries,
        *items.operands(),
        *biases,
        *outs,
        *widths,
        *strides,
        table.parts,
        table.experts,
        table.slot_stride,
        items.top_k,
        items.top_k if out_top_k is None else out_top_k,
        items.ids_stride,
        table.rank,
        adds,
        table.float,
        block,
        bn,
        RANK_TILE,
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


def _shrink_small_batch(x: Tensor, table: AdapterTable, items: Items, shrunk: Tensor) -> None:
    bk = min(next_power_of_2(table.cols), COLS_OF_PROGRAM)
    shrink_small_batch_kernel(
        (min(RANK_TILE, table.rank) // RANKS_OF_PROGRAM, table.parts, len(items.slots)),
        x,
        items.slots,
        table.entries,
        items.count,
        shrunk,
        table.cols,
        row_stride(x),
        table.parts,
        table.slot_stride,
        table.rank,
        table.float,
        RANKS_OF_PROGRAM,
        bk,
        pdl(),
        num_warps=4 if bk <= 2048 else 8,
        launch_pdl=pdl(),
    )


def _expand_small_batch(shrunk: Tensor, table: AdapterTable, items: Items, out: Sequence[Tensor]) -> None:
    bn = 128
    outs = [*out, None, None][:3]
    widths = [0 if o is None else o.shape[1] for o in outs]
    expand_small_batch_kernel(
        (sum(-(-width // bn) for width in widths), len(items.slots)),
        shrunk,
        items.slots,
        table.entries,
        items.count,
        *outs,
        *widths,
        *(0 if o is None else row_stride(o) for o in outs),
        table.parts,
        table.slot_stride,
        table.rank,
        table.float,
        bn,
        RANK_TILE,
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


def expand_sum(shrunk: Tensor, table: AdapterTable, items: Items, weights: Tensor, out: Tensor) -> None:
    """Computes out[row] += sum over j of weights[row, j] * B shrunk[row * top_k + j], over the row's routes. weights
    float32 [n, top_k], may be columns of a wider tensor; out [n, rows]."""
    bn = 128
    expand_sum_kernel(
        (-(-out.shape[1] // bn), len(items.slots)),
        shrunk,
        items.slots,
        table.entries,
        items.ids,
        weights,
        items.count,
        out,
        out.shape[1],
        row_stride(out),
        table.experts,
        table.slot_stride,
        items.top_k,
        items.ids_stride,
        row_stride(weights),
        table.rank,
        table.float,
        bn,
        RANK_TILE,
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )
