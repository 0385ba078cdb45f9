"""Experts with weights as integers in float16 (kernels/experts/integers.py), against the reference, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels import launch
from moeserve.kernels.experts.integers import (
    down_tile,
    has_gated_integers,
    integer_method,
    integers_down,
    integers_up,
)
from moeserve.kernels.experts.op import align_routes, num_blocks
from moeserve.kernels.experts.reference import activate
from moeserve.kernels.linear.integers import IntegerRows, has_integers, integer_order
from moeserve.kernels.linear.operands import SILU, Gated, RouteBlocks
from moeserve.kernels.planes import dequantize
from tests.kernels.experts.triton_experts import random_ids, widened
from tests.kernels.quantization.plane_tensors import planes_of
from tests.kernels.triton_device import counter
from tests.kernels.weights import Type, nmse

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)
EXPERTS, TOP_K = 5, 3


def rows(n: int, cols: int) -> IntegerRows:
    """Poisoned, so that what is not written shows."""
    return IntegerRows(
        torch.full((n, cols), torch.nan, dtype=torch.float16, device="cuda"),
        torch.full((n, cols // 16), torch.nan, dtype=torch.float16, device="cuda"),
        torch.full((n,), torch.nan, device="cuda"),
    )


@pytest.mark.parametrize(("hidden", "ff"), [(512, 256), (2048, 768), (256, 1280), (768, 200)])
@pytest.mark.parametrize(("n", "live"), [(16, 9), (64, 64), (128, 100), (256, 200), (1024, 700)])
def test_products(n: int, live: int, hidden: int, ff: int) -> None:
    """Some routes are elsewhere, the last rows are not there, numbers differ by 10^6, and parts are columns of a wider
    tensor. Experts have more rows than a block."""
    gate, up = (planes_of(Type.Q4_K, EXPERTS, ff, hidden) for _ in range(2))
    g = torch.Generator().manual_seed(n + hidden)
    x = torch.randn(n, hidden, generator=g) * 10.0 ** torch.randint(-3, 4, (n, 1), generator=g)
    x = x.bfloat16().cuda()
    ids = random_ids(n, EXPERTS, TOP_K, seed=n)
    ids[0, -1] = -1
    block = integer_method(n).block
    blocks = num_blocks(n, TOP_K, EXPERTS, block)
    routing = RouteBlocks(
        torch.empty(blocks, dtype=torch.int32, device="cuda"),
        torch.empty(blocks, block, dtype=torch.int32, device="cuda"),
    )
    count, method = counter(live), integer_method(n)
    align_routes(widened(ids), count, EXPERTS, routing.expert, routing.routes)
    assert has_gated_integers(gate, up, SILU)

    h = torch.full((n * TOP_K, ff), torch.nan, device="cuda")
    ordered = rows(n, hidden)
    integer_order(x, count, ordered)
    integers_up(ordered, gate, up, routing, TOP_K, h, tile=method.up)
    there = (ids >= 0) & (torch.arange(n) < live)[:, None]
    gates, ups = (dequantize(m).double().view(EXPERTS, ff, hidden) for m in (gate, up))
    for token, j in there.nonzero().tolist():
        expert = int(ids[token, j])
        wide = x[token].double()
        expected = activate(gates[expert] @ wide, ups[expert] @ wide, "silu")
        assert nmse(h[token * TOP_K + j].double().cpu(), expected.cpu()) < 1e-6
    assert h.view(n, TOP_K, ff)[~there.cuda()].isnan().all()

    if ff % 256:
        return
    h_ordered = rows(n * TOP_K, ff)
    integer_order(h, count, h_ordered, TOP_K)
    for kind in (Type.Q4_K, Type.Q6_K):
        down = planes_of(kind, EXPERTS, hidden, ff)
        parts = widened(torch.full((n, TOP_K, hidden), torch.nan))
        downs = dequantize(down).double().view(EXPERTS, hidden, ff)
        integers_down(h_ordered, down, routing, parts, tile=down_tile(down, method))
        for token, j in there.nonzero().tolist():
            expected = downs[int(ids[token, j])] @ h[token * TOP_K + j].double()
            assert nmse(parts[token, j].double().cpu(), expected.cpu()) < 1e-6
        assert parts[~there.cuda()].isnan().all()


def test_what_is_not_supported() -> None:
    gate = planes_of(Type.Q4_K, 1, 256, 256)
    assert has_integers(gate)
    for kind in (Type.Q4_0, Type.Q4_1, Type.Q5_K, Type.Q3_K, Type.IQ4_XS, Type.MXFP4, Type.BF16):
        assert not has_integers(planes_of(kind, 1, 256, 256))
    six_bits = planes_of(Type.Q6_K, 1, 256, 256)
    assert has_integers(six_bits)
    assert not has_gated_integers(gate, six_bits, SILU)
    bias = torch.zeros(1, 256, device="cuda")
    for options in (Gated("gelu"), Gated(limit=7.0), Gated(gate_bias=bias, up_bias=bias)):
        assert not has_gated_integers(gate, gate, options)


def test_other_gpus_have_the_ordinary_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WARPGROUPS", False)
    assert not has_integers(planes_of(Type.Q4_K, 1, 256, 256))
