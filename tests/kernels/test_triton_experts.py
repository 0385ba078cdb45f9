"""Alignment of routes, and whole expert layers against the reference, by every method a batch size takes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts import op
from moeserve.kernels.experts.reference import experts as reference
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.planes import dequantize
from moeserve.kernels.quantize.reference import quantize, round_trip
from tests.kernels.test_triton_linear import planes_of, tensors
from tests.kernels.weights import Type, nmse


def random_ids(n: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(n)]).int()


@pytest.mark.parametrize(
    ("n", "experts", "top_k", "block"), [(1, 128, 8, 4), (40, 7, 3, 4), (150, 8, 8, 16), (9, 5, 1, 64)]
)
def test_alignment(n: int, experts: int, top_k: int, block: int) -> None:
    """Every live route in one block, its expert's, in order; nothing else anywhere."""
    live = max(1, n - 2)
    ids = random_ids(n, experts, top_k)
    ids[0, 0] = -1  # an expert that is elsewhere
    blocks = op.num_blocks(n, top_k, experts, block)
    expert = torch.full((blocks,), -7, dtype=torch.int32, device=DEVICE)
    routes = torch.full((blocks, block), -7, dtype=torch.int32, device=DEVICE)
    op.align_routes(ids.to(DEVICE), counter(live), experts, expert, routes)
    flat = ids[:live].flatten()
    expected_experts, expected_routes = [], []
    for e in range(experts):
        mine = torch.nonzero(flat == e).flatten().tolist()
        for first in range(0, len(mine), block):
            some = mine[first : first + block]
            expected_experts.append(e)
            expected_routes.append(some + [-1] * (block - len(some)))
    used = len(expected_experts)
    assert expert.tolist() == expected_experts + [-1] * (blocks - used)
    assert routes[:used].tolist() == expected_routes


def run(
    kinds: tuple[Type, Type, Type],
    n: int,
    method: op.Method,
    *,
    hidden: int = 256,
    ff: int = 64,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert layer by a method, and its reference. One expert more than are chosen, the last row not live."""
    experts, live = top_k + 1, max(1, n - 1)
    if Type.Q6_K in kinds[2:]:
        ff = 256
    gate, up = planes_of(kinds[0], experts, ff, hidden), planes_of(kinds[1], experts, ff, hidden)
    down = planes_of(kinds[2], experts, hidden, ff)
    x = torch.randn(n, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = random_ids(n, experts, top_k)
    ids[0, -1] = -1
    weights = torch.rand(n, top_k, generator=torch.Generator().manual_seed(2))
    q = quantize(x.float())
    gemv = method.up is None
    quantised_h = gemv and down.quantised
    h = GpuActivations.empty(
        n * top_k, ff, DEVICE, dtype=None if quantised_h else dtype, quantised=quantised_h
    )
    xs = (x.to(DEVICE), q.codes.to(DEVICE), q.scales.to(DEVICE))
    matrices = (tensors(gate), int(gate.type), tensors(up), int(up.type), hidden)
    there = (ids >= 0)[..., None]
    if method.up is None:
        ids_there = ids.clone()
        ids_there[live:] = -1
        out = torch.ones(n, hidden, device=DEVICE)
        small_batch_up(*xs, *matrices, ids_there.to(DEVICE), h.x, h.codes, h.scales)
        small_batch_down(
            h.x, h.codes, h.scales, tensors(down), int(down.type), ff, ids_there.to(DEVICE), weights.to(DEVICE),
            counter(live), out, adds=True,
        )  # fmt: skip
        assert (out[live:] == 1).all()
        got = out.cpu()[:live] - 1
    else:
        assert h.x is not None
        blocks = op.num_blocks(n, top_k, experts, method.block)
        block_expert = torch.empty(blocks, dtype=torch.int32, device=DEVICE)
        block_routes = torch.empty(blocks, method.block, dtype=torch.int32, device=DEVICE)
        op.align_routes(ids.to(DEVICE), counter(live), experts, block_expert, block_routes)
        parts = torch.zeros(n, top_k, hidden, device=DEVICE)
        op.experts_up(xs[0], *matrices, block_expert, block_routes, top_k, h.x)
        op.experts_down(
            h.x, tensors(down), int(down.type), ff, block_expert, block_routes, counter(live), parts
        )  # fmt: skip
        got = (parts.cpu() * weights[..., None] * there).sum(1)[:live]
    through = [round_trip if gemv and p.quantised else torch.Tensor.double for p in (gate, up, down)]
    expected = reference(
        x[:live].float(), dequantize(gate).cpu(), dequantize(up).cpu(), dequantize(down).cpu(), ids[:live].clamp(min=0),
        weights[:live] * there[:live, :, 0], *through,
    )  # fmt: skip
    return got, expected


MIX = (Type.Q4_K, Type.Q4_K, Type.Q6_K)


OTHERS = (Type.Q8_0, Type.MXFP4, Type.Q5_0)
FLOATS = [(Type.F16, Type.Q4_K, Type.F16), (Type.Q4_K, Type.F32, Type.Q8_0)]


@pytest.mark.parametrize(
    ("kinds", "tokens"),
    [(MIX, 1), (MIX, 8), (OTHERS, 16), *((kinds, 2) for kinds in FLOATS)],
)
def test_gemv(kinds: tuple[Type, Type, Type], tokens: int) -> None:
    """The method of `tokens` rows, on a few. A code of h may round the other way where a value lies between two: 1e-6
    of the power."""
    got, expected = run(kinds, min(tokens, 5), op.method_for(tokens))
    assert nmse(got, expected) < 1e-5


def test_up_of_more_units_than_threads_take_at_once() -> None:
    """Nine units of columns, of which it takes eight at once."""
    got, expected = run(OTHERS, 5, op.method_for(8), hidden=1056, ff=32, top_k=1)
    assert nmse(got, expected) < 1e-5


def test_down_of_more_units_than_threads_take_at_once() -> None:
    """17 experts of two units of columns, of which it takes 32 at once."""
    n, top_k, ff, hidden = 5, 17, 256, 32
    down = planes_of(Type.Q5_0, top_k, hidden, ff)
    h = torch.randn(n * top_k, ff, generator=torch.Generator().manual_seed(1))
    ids, weights, q = random_ids(n, top_k, top_k), torch.rand(n, top_k), quantize(h)
    out = torch.empty(n, hidden, device=DEVICE)
    small_batch_down(
        None, q.codes.to(DEVICE), q.scales.to(DEVICE), tensors(down), int(down.type), ff, ids.to(DEVICE),
        weights.to(DEVICE), counter(n), out,
    )  # fmt: skip
    products = (dequantize(down).cpu()[ids.long()] @ round_trip(h).view(n, top_k, ff, 1).float())[..., 0]
    assert nmse(out.cpu(), (weights[..., None] * products).sum(1).double()) < 1e-10


@pytest.mark.parametrize(
    ("kinds", "tokens"),
    [
        (MIX, 64),
        (OTHERS, 64),
        (MIX, 128),
        (MIX, 256),
        (MIX, 1024),
        pytest.param(OTHERS, 1024, marks=pytest.mark.slow),
        pytest.param(FLOATS[0], 1024, marks=pytest.mark.slow),
        (FLOATS[1], 256),
    ],
)
def test_gemm(kinds: tuple[Type, Type, Type], tokens: int) -> None:
    """The method of `tokens` rows, on a few; float16 activations, weights and products."""
    got, expected = run(kinds, 9, op.method_for(tokens), dtype=torch.float16)
    assert nmse(got, expected) < 1e-6
