"""What the GPU's kernels of adapters add, against the reference: rows and routes of several adapters and of none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts import op as experts_op
from moeserve.kernels.linear.operands import RouteBlocks
from moeserve.kernels.lora import op
from moeserve.kernels.lora.op import AdapterTable, Items
from moeserve.kernels.lora.reference import Pair, add_adapters
from moeserve.kernels.quantize.reference import quantize
from tests.kernels.weights import nmse

COLS, RANK = 64, 32
HIGHEST = torch.float32 if DEVICE == "cpu" else torch.bfloat16


class Products:
    """Random adapters in slots, some of which leave some products alone."""

    def __init__(self, rows: Sequence[int], experts: int, ranks: Sequence[Sequence[int]]) -> None:
        """ranks: [slots][products], a part's experts one after another; 0: left alone."""
        g = torch.Generator().manual_seed(len(rows) * 10 + experts)
        self.held: list[torch.Tensor] = []
        entries = torch.zeros(len(ranks), len(rows) * experts, 4, dtype=torch.int64)
        self.pairs: list[list[Pair | None]] = []
        for slot, of_slot in enumerate(ranks):
            self.pairs.append([])
            for product, rank in enumerate(of_slot):
                width = rows[product // experts]
                a, b = torch.randn(rank, COLS, generator=g) / 8, torch.randn(width, rank, generator=g)
                a, b = a.to(HIGHEST).float(), b.to(HIGHEST).float()
                self.pairs[-1].append((a, b) if rank else None)
                padded = -(-rank // op.RANK_TILE) * op.RANK_TILE
                for column, matrix in ((0, torch.zeros(padded, COLS)), (1, torch.zeros(width, padded))):
                    matrix[: (rank, width)[column], : (COLS, rank)[column]] = (a, b)[column]
                    self.held.append(matrix.to(DEVICE, HIGHEST))
                    entries[slot, product, column] = self.held[-1].data_ptr()
                entries[slot, product, 2] = padded
        self.table = AdapterTable(entries.to(DEVICE), len(rows), experts, COLS, RANK, HIGHEST)

    def of_part(self, part: int, experts: int) -> list[Pair | None]:
        """By slot * experts + expert."""
        return [pair for of_slot in self.pairs for pair in of_slot[part * experts : (part + 1) * experts]]


def shrunk_for(items: int, parts: int) -> torch.Tensor:
    return torch.full((items * parts * RANK,), 77.0, device=DEVICE)  # what is not written must not be read


@pytest.mark.parametrize(("block", "cols_at_once"), [(1, 4096), (1, 16), (16, 4096)])
def test_rows_of_three_outputs(block: int, cols_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by themselves and in blocks of mixed adapters; the last rows do not exist."""
    monkeypatch.setattr(op, "ROWS_BY_THEMSELVES", 64 if block == 1 else 0)
    monkeypatch.setattr(op, "COLS_OF_PROGRAM", cols_at_once)
    monkeypatch.setattr(op, "BLOCK", block)
    widths = (80, 40, 24)
    products = Products(widths, 1, [(8, 20, 0), (32, 0, 16), (0, 5, 3)])
    slots = (
        [2, -1, 0, 1] if block == 1 else [2, -1, 0, 1, 1, -1, 2, 0, 0, 2, -1, 1, 0, 0, 0, 2, 2, -1, 1, 0, 1]
    )
    live = len(slots) - 1
    g = torch.Generator().manual_seed(0)
    x = torch.randn(len(slots), COLS, generator=g)
    wide = torch.randn(len(slots), sum(widths) + 8, generator=g)
    outs = list(wide.clone().to(DEVICE)[:, :-8].split(widths, 1))
    items = Items(ints(slots), counter(live))
    shrunk = shrunk_for(len(slots), 3)
    op.shrink(GpuActivations(x.to(DEVICE), None, None), products.table, items, shrunk)
    op.expand(shrunk, products.table, items, outs)
    for part, (found, before) in enumerate(zip(outs, wide[:, :-8].split(widths, 1), strict=True)):
        expected = add_adapters(x, torch.tensor(slots), products.of_part(part, 1), before)
        assert nmse(found[:live].cpu(), expected[:live]) < 1e-5
        assert torch.equal(found[live:].cpu(), before[live:])


EXPERTS, TOP_K, HIDDEN, FF = 3, 2, 40, 24
ROUTE_IDS = [[0, 2], [1, -1], [2, 0], [0, 1]]
ROUTE_SLOTS = [1, 0, -1, 1]
LIVE = 3  # rows


def of_routes() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat: which routes exist, their rows, and slot * EXPERTS + expert, below 0 without an adapter."""
    ids = torch.tensor(ROUTE_IDS).flatten()
    rows = torch.arange(len(ids)) // TOP_K
    slots = torch.tensor(ROUTE_SLOTS)[rows]
    exist = (ids >= 0) & (rows < LIVE)
    return exist, rows, torch.where(slots < 0, -1, slots * EXPERTS + ids)


def items_of(*, in_blocks: bool) -> Items:
    wide = ints([[*row, 7] for row in ROUTE_IDS])
    ids, count = wide[:, :TOP_K], counter(LIVE)
    slots = ints(ROUTE_SLOTS)
    if not in_blocks:
        return Items(slots, count, TOP_K, ids)
    blocks = experts_op.num_blocks(len(ROUTE_IDS), TOP_K, EXPERTS, 16)
    expert = torch.full((blocks,), -7, dtype=torch.int32, device=DEVICE)
    routes = torch.full((blocks, 16), 1 << 20, dtype=torch.int32, device=DEVICE)
    experts_op.align_routes(ids, count, EXPERTS, expert, routes)
    return Items(slots, count, TOP_K, blocks=RouteBlocks(expert, routes))


@pytest.mark.parametrize("in_blocks", [False, True])
def test_gate_and_up_of_experts(in_blocks: bool) -> None:
    """Written with the experts' biases for every route, the base's too."""
    products = Products((FF, FF), EXPERTS, [(8, 0, 8, 16, 8, 0), (0, 32, 4, 4, 4, 4)])
    g = torch.Generator().manual_seed(0)
    x, bias = torch.randn(len(ROUTE_IDS), COLS, generator=g), torch.randn(EXPERTS, FF, generator=g)
    items = items_of(in_blocks=in_blocks)
    num = len(ROUTE_IDS) * TOP_K
    shrunk, outs = shrunk_for(num, 2), [torch.full((num, FF), 55.0, device=DEVICE) for _ in range(2)]
    op.shrink(GpuActivations(x.to(DEVICE), None, None), products.table, items, shrunk, x_top_k=TOP_K)
    op.expand(shrunk, products.table, items, outs, adds=False, biases=(bias.to(DEVICE), None))
    exist, rows, which = of_routes()
    before = bias[torch.tensor(ROUTE_IDS).flatten().clamp(min=0)]
    for part, start in enumerate((before, torch.zeros(num, FF))):
        expected = add_adapters(x[rows], which, products.of_part(part, EXPERTS), start)
        assert nmse(outs[part].cpu()[exist], expected[exist]) < 1e-5
        assert (outs[part].cpu()[~exist] == 55.0).all()


@pytest.mark.parametrize("in_blocks", [False, True])
def test_down_of_experts(in_blocks: bool) -> None:
    """With few rows, the weighted sum of a row's routes, from int8; with many, a part for each route, among others'
    parts."""
    products = Products((HIDDEN,), EXPERTS, [(8, 0, 16), (32, 4, 4)])
    g = torch.Generator().manual_seed(0)
    num = len(ROUTE_IDS) * TOP_K
    h, items = torch.randn(num, COLS, generator=g), items_of(in_blocks=in_blocks)
    shrunk = shrunk_for(num, 1)
    exist, rows, which = of_routes()
    if in_blocks:
        op.shrink(GpuActivations(h.to(DEVICE), None, None), products.table, items, shrunk)
        parts = torch.randn(len(ROUTE_IDS), TOP_K + 1, HIDDEN, generator=g)
        out = parts.clone().to(DEVICE)
        op.expand(shrunk, products.table, items, [out.view(-1, HIDDEN)], out_top_k=TOP_K + 1)
        expected = parts.clone()
        added = add_adapters(h, which, products.of_part(0, EXPERTS), torch.zeros(num, HIDDEN))
        expected[:, :TOP_K] += (added * exist[:, None]).view(-1, TOP_K, HIDDEN)
        assert nmse(out.cpu(), expected) < 1e-5
        return
    q = quantize(h)
    op.shrink(GpuActivations(None, q.codes.to(DEVICE), q.scales.to(DEVICE)), products.table, items, shrunk)
    weights, sums = torch.rand(len(ROUTE_IDS), TOP_K, generator=g), torch.randn(len(ROUTE_IDS), HIDDEN)
    out = sums.clone().to(DEVICE)
    op.expand_sum(shrunk, products.table, items, weights.to(DEVICE), out)
    exact = (q.codes.float().view(num, -1, 32) * q.scales[..., None]).view(num, COLS)
    added = add_adapters(exact, which, products.of_part(0, EXPERTS), torch.zeros(num, HIDDEN))
    shares = weights.flatten() * exist
    expected = sums.index_add(0, rows, added * shares[:, None])
    assert nmse(out.cpu(), expected) < 1e-5
    assert torch.equal(out[LIVE:].cpu(), sums[LIVE:])
