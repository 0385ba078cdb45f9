"""What multiplies by weights, or takes them apart: matrices, experts, adapters."""

from __future__ import annotations

import torch

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.integers import IntegerWorkspace, down_tile, integers_down, integers_up
from moeserve.kernels.experts.large_batch import large_batch_down, large_batch_up
from moeserve.kernels.experts.op import BlockWorkspace, align_routes, experts_down, experts_up
from moeserve.kernels.experts.quads import QuadWorkspace, quad_order, quads_down, quads_up
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.gating import Activation, form_of
from moeserve.kernels.linear import join_gated, op, operands
from moeserve.kernels.linear.integer_pieces import partial_numbers
from moeserve.kernels.linear.integers import DenseIntegers, IntegerRows, integer_order
from moeserve.kernels.linear.large_batch import BLOCK, UnpackScratch, large_batch_linear
from moeserve.kernels.lora import op as lora
from moeserve.kernels.planes import empty_planes
from moeserve.kernels.planes.panels_triton import unpack_panels, unpack_scattered
from moeserve.models.integer_buffers import DENSE_INTEGER_ROWS
from moeserve.quantization.quant_type import QuantType
from moeserve.quantization.table import BF16
from tests.support.measuring.gpu_operators.tensors import Q4, both, empty, f32, i32, weight


def linear(
    n: int,
    kind: QuantType,
    cols: int,
    rows: int,
    second: QuantType | None,
    second_rows: int,
    bias: bool = False,
) -> None:
    x = both(n, cols, f32 if n <= op.INT8_TOKENS else torch.bfloat16)
    other = None if second is None else weight(second, second_rows, cols)
    op.linear(
        *x,
        empty(1, dtype=i32),
        weight(kind, rows, cols),
        int(kind),
        other,
        int(second or 0),
        cols,
        empty(n, rows + second_rows),
        bias=empty(rows + second_rows) if bias else None,
    )


def exact(n: int) -> None:
    """A router of bfloat16."""
    op.linear(
        empty(n, 512),
        None,
        None,
        empty(1, dtype=i32),
        weight(BF16, 128, 512),
        int(BF16),
        None,
        0,
        512,
        empty(n, 128),
    )


def gated_rows() -> None:
    join_gated.gated_rows(
        empty(4, 6000), empty(1, dtype=i32), GpuActivations(*both(4, 3000)), form_of("silu")
    )


def experts(
    n: int,
    kind: QuantType,
    down: QuantType,
    experts: int = 128,
    top_k: int = 8,
    oai: bool = False,
    activation: Activation = "silu",
) -> None:
    hidden, ff, wide = 512, 256, top_k + 1 if experts == 1 else top_k
    room, ids = BlockWorkspace(n, top_k, experts, "meta"), empty(n, wide, dtype=i32)[:, :top_k]
    count, few = empty(1, dtype=i32), room.method.up is None
    dtype = f32 if few else torch.bfloat16
    gate, half = weight(kind, experts, ff, hidden), empty(n * top_k, ff, dtype=dtype)
    of_gate, of_up, of_down = [empty(experts, size) if oai else None for size in (ff, ff, hidden)]
    options = operands.Gated("swiglu_oai" if oai else activation, of_gate, of_up)
    if few:
        h = both(n * top_k, ff, dtype)
        small_batch_up(
            *both(n, hidden, dtype), gate, int(kind), gate, int(kind), hidden, ids, *h, options=options
        )
        small_batch_down(
            *h,
            weight(down, experts, hidden, ff),
            int(down),
            ff,
            ids,
            empty(n, wide)[:, :top_k],
            count,
            empty(n, hidden),
            bias=of_down,
        )
        return
    align_routes(ids, count, experts, room.expert, room.routes)
    experts_up(
        empty(n, hidden, dtype=dtype),
        gate,
        int(kind),
        gate,
        int(kind),
        hidden,
        room.expert,
        room.routes,
        top_k,
        half,
        options=options,
    )
    experts_down(
        half,
        weight(down, experts, hidden, ff),
        int(down),
        ff,
        room.expert,
        room.routes,
        count,
        empty(n, wide, hidden, dtype=dtype)[:, :top_k],
        bias=of_down,
    )


def adapters(n: int, dtype: torch.dtype) -> None:
    """Adapters of q, k and v, and of experts, whose quantised products take what the adapters add."""
    hidden, ff, num, top_k, count = 512, 256, 128, 8, empty(1, dtype=i32)
    entries, slots = empty(16, 3 * num, 4, dtype=torch.int64), empty(n, dtype=i32)

    def table(parts: int, num: int, cols: int) -> lora.AdapterTable:
        return lora.AdapterTable(entries[:, : parts * num], parts, num, cols, 64, torch.bfloat16)

    rows, of_rows, shrunk = lora.Items(slots, count), table(3, 1, hidden), empty(n * 2 * top_k * 64)
    x = both(n, hidden, dtype)
    y = GpuActivations(*x)
    lora.shrink(y, of_rows, rows, shrunk)
    lora.expand(shrunk, of_rows, rows, empty(n, 1024, dtype=dtype)[:, :768].split((512, 128, 128), 1))
    room, ids = BlockWorkspace(n, top_k, num, "meta"), empty(n, top_k + 1, dtype=i32)[:, :top_k]
    few = room.method.up is None
    gate, up = empty(n * top_k, ff, dtype=dtype), empty(n * top_k, ff, dtype=dtype)
    blocks = operands.RouteBlocks(room.expert, room.routes)
    items = lora.Items(slots, count, top_k, ids) if few else lora.Items(slots, count, top_k, blocks=blocks)
    lora.shrink(y, table(2, num, hidden), items, shrunk, x_top_k=top_k)
    biases = (empty(num, ff), empty(num, ff))
    lora.expand(shrunk, table(2, num, hidden), items, (gate, up), adds=False, biases=biases)
    options = operands.Gated("silu", gate, up, True)
    planes, h = weight(Q4, num, ff, hidden), both(n * top_k, ff, dtype)
    parts = empty(n, top_k + 1, hidden, dtype=dtype)
    if few:
        small_batch_up(*both(n, hidden), planes, int(Q4), planes, int(Q4), hidden, ids, *h, options=options)
        lora.shrink(GpuActivations(None, *h[1:]), table(1, num, ff), items, shrunk)
        lora.expand_sum(
            shrunk, table(1, num, ff), items, empty(n, top_k + 1)[:, :top_k], parts[:, 0].contiguous()
        )
        return
    experts_up(
        x[0], planes, int(Q4), planes, int(Q4), hidden, room.expert, room.routes, top_k, h[0], options=options
    )
    few_blocks, scratch = BlockWorkspace(30, top_k, num, "meta"), UnpackScratch(empty(1 << 24, dtype=dtype))
    experts_up(
        x[0][:30],
        planes,
        int(Q4),
        planes,
        int(Q4),
        hidden,
        few_blocks.expert,
        few_blocks.routes,
        top_k,
        h[0][:240],
        options=options,
    )
    wide = BlockWorkspace(n, top_k, num, "meta", large_batch_block=BLOCK)
    large_batch_up(
        x[0],
        planes,
        int(Q4),
        planes,
        int(Q4),
        hidden,
        operands.RouteBlocks(wide.expert, wide.routes),
        top_k,
        h[0],
        scratch,
        options=options,
    )
    lora.shrink(GpuActivations(h[0], None, None), table(1, num, ff), items, shrunk)
    lora.expand(shrunk, table(1, num, ff), items, [parts[0]], out_top_k=top_k + 1)


def quads(n: int, kind: QuantType, down: QuantType) -> None:
    hidden, ff, num, top_k, dtype = 512, 256, 128, 8, torch.bfloat16
    s, gate = QuadWorkspace(n, top_k, num, empty(n, hidden, dtype=dtype)), weight(kind, num, ff, hidden)
    count = empty(1, dtype=i32)
    routing, h = operands.RouteBlocks(s.expert, s.routes), empty(n * top_k, ff, dtype=dtype)
    quad_order(empty(n, hidden, dtype=dtype), count, s.x)
    quads_up(s.x, gate, int(kind), gate, int(kind), hidden, routing, top_k, h, tile=s.method.up)
    quads_down(
        h,
        weight(down, num, hidden, ff),
        int(down),
        ff,
        routing,
        empty(n, top_k, hidden, dtype=dtype),
        tile=s.method.down,
    )


def integers(n: int, kind: QuantType = Q4) -> None:
    """kind: of down and of whole matrices."""
    hidden, ff, num, top_k = 512, 768, 128, 8
    count = empty(1, dtype=i32)
    gate, down = empty_planes(Q4, (num, ff, hidden), "meta"), empty_planes(kind, (num, hidden, ff), "meta")
    x, h = _integer_rows(n, hidden), _integer_rows(n * top_k, ff)
    s = IntegerWorkspace(n, top_k, num, x, h, takes_six_bits=True)
    out = empty(n * top_k, ff, dtype=torch.bfloat16)
    integer_order(empty(n, hidden, dtype=torch.bfloat16), count, x)
    integers_up(x, gate, gate, s.routing, top_k, out, tile=s.method.up)
    integer_order(out, count, h, top_k)
    integers_down(h, down, s.routing, empty(n, top_k, hidden), tile=down_tile(down, s.method))
    if n < DENSE_INTEGER_ROWS.stop:
        dense = DenseIntegers(_integer_rows(n, hidden), empty(partial_numbers(n)))
        y = dense.order(empty(n, hidden, dtype=torch.bfloat16), count)
        for rows in (hidden, 32 * hidden):  # in pieces that share results, and not
            dense.multiply(y, [empty_planes(kind, (1, rows, hidden), "meta")], empty(n, rows))


def _integer_rows(n: int, cols: int) -> IntegerRows:
    halves = [empty(n, width, dtype=torch.float16) for width in (cols, cols // 16)]
    return IntegerRows(halves[0], halves[1], empty(n))


def large_batch(n: int, kind: QuantType, down: QuantType, block: int = BLOCK) -> None:
    hidden, ff, num, top_k, dtype = 512, 256, 128, 8, torch.bfloat16
    scratch = UnpackScratch(empty(1 << 24, dtype=dtype))
    room, gate = BlockWorkspace(n, top_k, num, "meta", large_batch_block=block), weight(kind, num, ff, hidden)
    x, routing = empty(n, hidden, dtype=dtype), operands.RouteBlocks(room.expert, room.routes)
    h = empty(n * top_k, ff, dtype=dtype)
    large_batch_up(x, gate, int(kind), gate, int(kind), hidden, routing, top_k, h, scratch)
    large_batch_down(
        h,
        weight(down, num, hidden, ff),
        int(down),
        ff,
        routing,
        empty(n, top_k, hidden, dtype=dtype),
        scratch,
    )
    w = operands.weight_of(weight(kind, 1, ff, hidden), int(kind), hidden)
    large_batch_linear(x, w, None, empty(1, dtype=i32), empty(n, ff), scratch)


def panels(*kinds: QuantType) -> None:
    for kind in kinds:
        nbytes = 2 * 64 * kind.row_bytes(768)
        unpack_panels(empty(nbytes, dtype=torch.uint8), empty_planes(kind, (2, 64, 768), "meta"), 2)
        unpack_scattered(empty(3, 4, dtype=torch.int64), kind, 64, 768)
