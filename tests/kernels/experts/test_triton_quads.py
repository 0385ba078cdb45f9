"""Experts by products of warpgroups, against the reference; on a GPU with the tiles in use, and in bfloat16."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.op import align_routes
from moeserve.kernels.experts.quads import (
    K_BLOCKS,
    QuadMethod,
    QuadTile,
    QuadWorkspace,
    quad_method,
    quad_order,
    quads_down,
    quads_up,
    takes_quads,
)
from moeserve.kernels.experts.reference import experts as reference
from moeserve.kernels.linear.operands import Gated, RouteBlocks
from moeserve.kernels.planes import dequantize, empty_planes
from moeserve.models.blocks.gpu.head_product import HeadProduct, head_product
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.quantization import QUANT_TYPES
from tests.kernels.experts.triton_experts import random_ids, widened
from tests.kernels.quantization.plane_tensors import planes_of, tensors
from tests.kernels.weights import Type, nmse

DTYPE = torch.float16 if DEVICE == "cpu" else torch.bfloat16
SMALL = QuadMethod(16, QuadTile(64, 4, 3), QuadTile(64, 4, 3))  # few programs, for the interpreter


def columns(cols: int) -> torch.Tensor:
    """Which column is at each place, by lanes, words and bytes."""
    order = []
    for group in range(cols // 256):
        for field in range(8):
            for word in range(K_BLOCKS):
                for half in range(2):
                    for lane in range(4):
                        byte = lane * 4 * K_BLOCKS + 4 * word + 2 * half
                        column = group * 256 + byte // 16 * 128 + field * 16 + byte % 16
                        order += [column, column + 1]
    return torch.tensor(order)


def test_quad_order() -> None:
    """Rows behind the count stay as they were."""
    x = torch.arange(5 * 768, device=DEVICE, dtype=torch.float32).view(5, 768)
    out = torch.full_like(x, -7)
    quad_order(x, counter(4), out)
    assert torch.equal(out[:4], x[:4, columns(768).to(DEVICE)])
    assert (out[4] == -7).all()
    assert torch.equal(columns(768).sort().values, torch.arange(768))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        (Type.Q4_K, Type.Q4_K, Type.Q6_K),
        pytest.param((Type.Q6_K, Type.Q4_0, Type.Q4_K), marks=pytest.mark.slow),
    ],
)
def test_experts_by_quads(kinds: tuple[Type, Type, Type]) -> None:
    """Some routes are elsewhere, the last row is not there, and parts are columns of a wider tensor."""
    n, live, experts, top_k, hidden, ff = 5, 4, 3, 2, 256, 256
    gate, up = planes_of(kinds[0], experts, ff, hidden), planes_of(kinds[1], experts, ff, hidden)
    down = planes_of(kinds[2], experts, hidden, ff)
    g = torch.Generator().manual_seed(1)
    x, weights = torch.randn(n, hidden, generator=g).to(DTYPE), torch.rand(n, top_k, generator=g)
    biases = [torch.randn(experts, rows, generator=g) for rows in (ff, ff, hidden)]
    of_gate, of_up, of_down = (b.to(DEVICE) for b in biases)
    ids = random_ids(n, experts, top_k)
    ids[0, -1] = -1
    there = (ids >= 0)[..., None]
    expected = reference(
        x[:live].float(), dequantize(gate).cpu(), dequantize(up).cpu(), dequantize(down).cpu(), ids[:live].clamp(min=0),
        weights[:live] * there[:live, :, 0], *[torch.Tensor.double] * 3, activation="silu",
        gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2],
    )  # fmt: skip
    for method in [SMALL] if DEVICE == "cpu" else map(quad_method, (256, 1024, 2048)):
        s = QuadWorkspace(n, top_k, experts, torch.empty(n, hidden, dtype=DTYPE, device=DEVICE), method)
        routing = RouteBlocks(s.expert, s.routes)
        align_routes(ids.to(DEVICE), counter(live), experts, s.expert, s.routes)
        quad_order(x.to(DEVICE), counter(n), s.x)
        h = torch.empty(n * top_k, ff, dtype=DTYPE, device=DEVICE)
        parts = widened(torch.zeros(n, top_k, hidden))
        of_gate_up = (tensors(gate), int(gate.type), tensors(up), int(up.type), hidden)
        quads_up(s.x, *of_gate_up, routing, top_k, h, tile=method.up, options=Gated("silu", of_gate, of_up))
        quads_down(h, tensors(down), int(down.type), ff, routing, parts, tile=method.down, bias=of_down)
        assert (parts._base[:, top_k:] == 77).all()  # type: ignore[index]
        got = (parts.cpu() * weights[..., None] * there).sum(1)[:live]
        assert nmse(got, expected) < (1e-6 if DEVICE == "cpu" else 1e-4)


@pytest.mark.parametrize("rows", [17, 65] if DEVICE == "cpu" else [17, 64, 128, 200, 256])
def test_a_head_by_quads(rows: int) -> None:
    """As one expert of all rows; those that do not exist are nobody's."""
    vocab, hidden, live = 80, 256, rows - 2
    head = planes_of(Type.Q6_K, 1, vocab, hidden)
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    logits = torch.zeros(rows, vocab, device=DEVICE)
    by_quads = HeadProduct(rows, hidden, torch.device(DEVICE), DTYPE)
    by_quads(MergedLinear(head), GpuActivations(x.to(DEVICE), None, None), counter(live), logits)
    expected = x[:live].double() @ dequantize(head)[0].cpu().double().T
    assert nmse(logits[:live].cpu(), expected) < (1e-6 if DEVICE == "cpu" else 1e-4)


def test_which_heads() -> None:
    """In bfloat16, from 17 rows on, with one matrix of a type for it and without a bias."""
    q6_k, q8_0 = (
        MergedLinear(empty_planes(QUANT_TYPES[kind], (1, 64, 512), "meta")) for kind in (Type.Q6_K, Type.Q8_0)
    )
    meta = torch.device("meta")
    assert head_product(q6_k, 64, torch.bfloat16, meta) is not None
    assert head_product(None, 64, torch.bfloat16, meta) is None
    assert head_product(q6_k, 16, torch.bfloat16, meta) is None
    assert head_product(q6_k, 64, torch.float16, meta) is None
    assert head_product(q8_0, 64, torch.bfloat16, meta) is None
    assert head_product(MergedLinear(q6_k.first, bias=torch.zeros(64)), 64, torch.bfloat16, meta) is None


def test_which_matrices() -> None:
    """Those of Q4_K_M and Q4_0, of whole super-blocks; not those by tables, whose mins are too far from the truth in
    bfloat16, or of other codes."""
    taken = {
        QUANT_TYPES[kind].name
        for kind in QUANT_TYPES
        if QUANT_TYPES[kind].gpu and takes_quads(empty_planes(QUANT_TYPES[kind], (2, 4, 512), "meta"))
    }
    assert taken == {"Q4_0", "Q4_K", "Q6_K"}
    of_half_a_block = empty_planes(QUANT_TYPES[Type.Q4_0], (2, 4, 384), "meta")
    assert not takes_quads(of_half_a_block)
