"""Products of many tokens by way of unpacked weights, against dequantised weights in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.experts import op
from moeserve.kernels.experts.large_batch import large_batch_down, large_batch_up
from moeserve.kernels.experts.reference import experts as reference
from moeserve.kernels.gating import Activation
from moeserve.kernels.linear.large_batch import (
    BLOCK,
    FEW_BLOCK,
    UnpackScratch,
    can_unpack,
    large_batch_linear,
    unpack,
)
from moeserve.kernels.linear.operands import Gated, RouteBlocks, weight_of
from moeserve.kernels.linear.reference import linear
from moeserve.kernels.planes import dequantize
from moeserve.models.loading.gpu_weights import GpuExperts
from moeserve.models.loading.unpacked_experts import unpack_experts
from tests.kernels.experts.triton_experts import random_ids, widened
from tests.kernels.quantization.plane_tensors import GUARD, planes_of, tensors
from tests.kernels.weights import GPU_TYPES, Type, activations, nmse
from tests.support.nightly import nightly_after


def scratch_of(numbers: int, dtype: torch.dtype = torch.float16) -> UnpackScratch:
    return UnpackScratch(torch.full((numbers,), float("nan"), dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("kind", nightly_after(5, GPU_TYPES), ids=lambda t: t.name)
def test_unpacked_weights_are_the_dequantised_ones_rounded(kind: Type) -> None:
    """The second expert's weights, as the odd rows of a matrix with twice as many."""
    planes = planes_of(kind, 2, 19, 512)
    weight = weight_of(tensors(planes), int(kind), 512)
    if not can_unpack(weight):
        assert kind == Type.F32
        return
    out = torch.full((1, 38, 512), GUARD, dtype=torch.float16, device=DEVICE)
    unpack(weight, out, 1, every=2, at=1)
    assert (out[:, 0::2] == GUARD).all()
    assert nmse(out[:, 1::2].cpu(), dequantize(planes)[1:].cpu()) < 1e-7


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.IQ2_XS], ids=lambda t: t.name)
def test_experts_without_a_route_are_not_unpacked(kind: Type) -> None:
    planes = planes_of(kind, 5, 19, 256)
    out = torch.full((4, 19, 256), GUARD, dtype=torch.float16, device=DEVICE)
    used = torch.tensor([4, 2, -1, 2, 0], dtype=torch.int32, device=DEVICE)
    unpack(weight_of(tensors(planes), int(kind), 256), out, 1, used=used)
    assert (out[[0, 2]] == GUARD).all()  # experts 1 and 3
    assert nmse(out[[1, 3]].cpu(), dequantize(planes)[[2, 4]].cpu()) < 1e-7


@pytest.mark.parametrize(("rows", "cols", "tokens"), [(70, 96, 140), (40, 256, 20)])
def test_two_matrices_with_a_bias(rows: int, cols: int, tokens: int) -> None:
    """One block of tokens, and more; rows and columns that fill no tile."""
    kinds = (Type.Q4_K, Type.Q6_K) if cols % 256 == 0 else (Type.Q5_0, Type.F16)
    first, second = planes_of(kinds[0], rows, cols), planes_of(kinds[1], 24, cols)
    x, live = activations("heavy-tailed", tokens, cols).half(), tokens - 3
    bias = torch.randn(rows + 24, generator=torch.Generator().manual_seed(0))
    out = torch.full((tokens, rows + 24), GUARD, device=DEVICE)
    weights = [weight_of(tensors(p), int(p.type), cols) for p in (first, second)]
    large_batch_linear(
        x.to(DEVICE), weights[0], weights[1], counter(live), out, scratch_of((rows + 24) * cols),
        bias=bias.to(DEVICE),
    )  # fmt: skip
    assert (out[live:] == GUARD).all()
    w = torch.cat([dequantize(first, 0), dequantize(second, 0)]).cpu()
    assert nmse(out[:live].cpu(), linear(x[:live], w, bias)) < 1e-6


def layer(
    kinds: tuple[Type, Type, Type],
    n: int,
    room: int,
    activation: Activation,
    *,
    biased: bool,
    block: int = BLOCK,
    hidden: int = 96,
    ff: int = 64,
    unpacked: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Three experts of which two are chosen, one of those elsewhere; the last row is not live. Parts are columns of a
    wider tensor. room: experts whose down fits into the scratch, half as many as for gate and up. unpacked: as with
    --unpacked-experts."""
    num, top_k, live = 3, 2, n - 1
    gate, up = planes_of(kinds[0], num, ff, hidden), planes_of(kinds[1], num, ff, hidden)
    down = planes_of(kinds[2], num, hidden, ff)
    x = torch.randn(n, hidden, generator=torch.Generator().manual_seed(1))
    ids = random_ids(n, num, top_k)
    ids[0, -1] = -1
    g = torch.Generator().manual_seed(3)
    biases = [torch.randn(num, rows, generator=g) for rows in (ff, ff, hidden)]
    of_gate, of_up, of_down = (b.to(DEVICE) if biased else None for b in biases)
    blocks = op.num_blocks(n, top_k, num, block)
    routing = RouteBlocks(
        torch.empty(blocks, dtype=torch.int32, device=DEVICE),
        torch.empty(blocks, block, dtype=torch.int32, device=DEVICE),
    )
    op.align_routes(ids.to(DEVICE), counter(live), num, routing.expert, routing.routes)
    scratch = scratch_of(room * hidden * ff + 5, torch.float32)  # fast under the interpreter
    h = torch.zeros(n * top_k, ff, device=DEVICE)
    parts = widened(torch.zeros(n, top_k, hidden))
    matrices = (tensors(gate), int(gate.type), tensors(up), int(up.type), hidden)
    options = Gated(activation, of_gate, of_up)
    unpacked_up, unpacked_down = None, None
    if unpacked:
        floats = unpack_experts(GpuExperts(gate, up, down), torch.float32).unpacked
        assert floats is not None
        unpacked_up, unpacked_down = floats
        scratch = scratch_of(5, torch.float32)  # no room for a single expert
    large_batch_up(x.to(DEVICE), *matrices, routing, top_k, h, scratch, options=options, unpacked=unpacked_up)
    large_batch_down(
        h, tensors(down), int(down.type), ff, routing, parts, scratch, bias=of_down, unpacked=unpacked_down
    )
    assert (parts._base[:, top_k:] == 77).all()  # type: ignore[index]
    weights, there = torch.rand(n, top_k, generator=g), (ids >= 0)
    expected = reference(
        x[:live].float(), *(dequantize(p).cpu() for p in (gate, up, down)), ids[:live].clamp(min=0),
        weights[:live] * there[:live], activation=activation,
        **(dict(zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True)) if biased else {}),
    )  # fmt: skip
    return (parts.cpu() * (weights * there)[..., None]).sum(1)[:live], expected


@pytest.mark.slow
@pytest.mark.parametrize("room", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_experts_a_few_at_a_time(room: int) -> None:
    got, expected = layer((Type.Q5_0, Type.Q8_0, Type.IQ4_NL), 40, room, "silu", biased=False)
    assert nmse(got, expected) < 1e-8


def test_experts_unpacked_before_give_the_same_bits() -> None:
    kinds = (Type.Q8_0, Type.Q8_0, Type.Q8_0)
    got, expected = layer(kinds, 5, 6, "silu", biased=False, block=FEW_BLOCK, hidden=64, ff=32, unpacked=True)
    assert nmse(got, expected) < 1e-8
    each_time, _ = layer(kinds, 5, 6, "silu", biased=False, block=FEW_BLOCK, hidden=64, ff=32)
    assert torch.equal(got, each_time)


@pytest.mark.slow  # 20 s of one core
def test_a_few_routes_of_experts_with_codebooks() -> None:
    kinds = (Type.IQ2_XXS, Type.IQ1_M, Type.IQ3_S)
    got, expected = layer(kinds, 9, 4, "silu", biased=False, block=FEW_BLOCK, hidden=256, ff=256)
    assert nmse(got, expected) < 1e-8


@pytest.mark.slow
def test_experts_with_more_routes_than_a_block_has() -> None:
    got, expected = layer((Type.Q8_0, Type.F16, Type.Q5_1), 290, 6, "silu", biased=False)
    assert nmse(got, expected) < 1e-8


@pytest.mark.slow
def test_experts_of_gpt_oss() -> None:
    got, expected = layer((Type.MXFP4, Type.MXFP4, Type.F16), 12, 3, "swiglu_oai", biased=True)
    assert nmse(got, expected) < 1e-8


def test_parts_that_are_no_columns_of_contiguous_ones() -> None:
    parts = torch.zeros(4, 2, 512, device=DEVICE)[..., ::2]
    down = planes_of(Type.Q4_K, 1, 256, 256)
    empty = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="strides"):
        large_batch_down(
            torch.zeros(8, 256), tensors(down), int(down.type), 256, RouteBlocks(empty, empty), parts,
            scratch_of(1 << 16),
        )  # fmt: skip
