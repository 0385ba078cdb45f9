"""The products with matrices in planes, against dequantised weights in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.embed.op import KvPlaces, embed
from moeserve.kernels.embed.reference import EMBEDDED
from moeserve.kernels.linear import wide_matrices
from moeserve.kernels.linear.op import INT8_TOKENS, GemmTile, linear, run_gemm, takes_int8
from moeserve.kernels.linear.operands import Weight, weight_of
from moeserve.kernels.linear.reference import linear as reference
from moeserve.kernels.planes import Planes, dequantize
from moeserve.kernels.quantize.reference import quantize, round_trip
from moeserve.quantization import QUANT_TYPES
from tests.kernels import weights
from tests.kernels.quantization.plane_tensors import GUARD, planes_of, tensors
from tests.kernels.weights import GPU_TYPES, activations, nmse
from tests.support.nightly import nightly_after


def run(p: Planes, x: torch.Tensor, live: int, *, integer: bool) -> torch.Tensor:
    """The first `live` rows of x through the operator; it may write no others."""
    q = quantize(x.float().cpu()) if integer else None
    out = torch.full((len(x), p.rows), GUARD, device=DEVICE)
    codes, scales = (None, None) if q is None else (q.codes.to(DEVICE), q.scales.to(DEVICE))
    linear(x.to(DEVICE), codes, scales, counter(live), tensors(p), int(p.type), None, 0, p.cols, out)
    assert (out[live:] == GUARD).all()
    return out[:live].cpu()


@pytest.mark.parametrize("kind", nightly_after(6, GPU_TYPES), ids=lambda t: t.name)
def test_few_tokens(kind: weights.Type) -> None:
    """Integer products are exact on quantised activations but for the float32 sums over groups."""
    p = planes_of(kind, 18, 512)
    x = activations("outlier channels", 2, 512)
    got = run(p, x, 1, integer=p.quantised)
    expected = reference(round_trip(x) if p.quantised else x, dequantize(p, 0).cpu())
    assert nmse(got, expected[:1]) < 1e-12


@pytest.mark.parametrize("kind", nightly_after(5, GPU_TYPES), ids=lambda t: t.name)
def test_many_tokens(kind: weights.Type) -> None:
    """Weights rounded to the activations' float16 before the dot: 2^-11 relative, 4e-8 of the power."""
    p = planes_of(kind, 18, 512)
    x = activations("gaussian", 20, 512).half()
    assert nmse(run(p, x, 18, integer=False), reference(x[:18], dequantize(p, 0).cpu())) < 1e-7


@pytest.mark.parametrize(
    ("rows", "cols", "tokens"),
    [
        *((1, 256, 1), (33, 96, 3)),
        pytest.param(70, 768, 3, marks=pytest.mark.slow),
        pytest.param(1, 256, 5, marks=pytest.mark.slow),
        pytest.param(70, 768, 8, marks=pytest.mark.slow),
        pytest.param(33, 96, 16, marks=pytest.mark.slow),
        (1, 256, 17),
        pytest.param(70, 768, 17, marks=pytest.mark.slow),
        (33, 96, 17),
    ],
)
def test_shapes(rows: int, cols: int, tokens: int) -> None:
    kind = weights.Type.Q4_K if cols % 256 == 0 else weights.Type.Q5_0
    p = planes_of(kind, rows, cols)
    x = activations("heavy-tailed", tokens, cols).half()
    small_batch = tokens <= INT8_TOKENS
    expected = reference(round_trip(x) if small_batch else x, dequantize(p, 0).cpu())
    assert nmse(run(p, x, tokens, integer=small_batch), expected) < 1e-6


@pytest.mark.parametrize(("tokens", "live"), [(1, 1), (3, 3), (8, 7), (8, 3)])
def test_more_columns_than_a_pass_takes(tokens: int, live: int) -> None:
    """Several tokens share what is read. Rows from `live` on stay as they were."""
    p, x = planes_of(weights.Type.Q4_K, 3, 5120), activations("gaussian", tokens, 5120)
    expected = reference(round_trip(x), dequantize(p, 0).cpu())[:live]
    assert nmse(run(p, x, live, integer=True), expected) < 1e-12


@pytest.mark.parametrize(
    ("kind", "cols", "tokens", "live"),
    [
        (weights.Type.Q4_K, 4352, 3, 2),
        (weights.Type.Q6_K, 4352, 8, 7),
        (weights.Type.Q8_0, 4128, 4, 4),  # 32 columns in the last K block
    ],
    ids=str,
)
def test_wide_matrices(
    monkeypatch: pytest.MonkeyPatch, kind: weights.Type, cols: int, tokens: int, live: int
) -> None:
    """The tensor cores multiply float32 activations that they round to bfloat16. The last row fills no tile."""
    monkeypatch.setattr(wide_matrices, "WIDE_ROWS", 33)
    p, x = planes_of(kind, 33, cols), activations("outlier channels", tokens, cols)
    expected = reference(x.bfloat16().float(), dequantize(p, 0).cpu())[:live]
    assert nmse(run(p, x, live, integer=True), expected) < 1e-11


def test_which_products_of_few_tokens_are_gemvs() -> None:
    def matrix(rows: int, cols: int, kind: weights.Type = weights.Type.Q4_K) -> Weight:
        return replace(small, format=QUANT_TYPES[int(kind)].planes_form, rows=rows, cols=cols)

    small = weight_of(tensors(planes_of(weights.Type.Q4_K, 1, 256)), int(weights.Type.Q4_K), 256)
    wide, x = matrix(5120, 4352), torch.empty(0)
    assert [n for n in range(1, 10) if takes_int8(n, x, wide)] == [1, 2]
    assert [n for n in range(1, 10) if takes_int8(n, None, wide)] == list(
        range(1, 9)
    )  # int8 activations alone
    for other in (matrix(5120, 4096), matrix(2048, 4352), matrix(5120, 4352, weights.Type.IQ3_S)):
        assert takes_int8(8, x, other)
    assert takes_int8(8, x, wide, matrix(5120, 4352, weights.Type.IQ3_S))  # one launch for both


@pytest.mark.parametrize("tokens", [3, 20])
def test_a_second_matrix(tokens: int) -> None:
    p, second = planes_of(weights.Type.Q4_K, 40, 256), planes_of(weights.Type.Q6_K, 24, 256)
    x = activations("gaussian", tokens, 256).half()
    q = quantize(x.float())
    out = torch.full((tokens, 64), GUARD, device=DEVICE)
    linear(
        x.to(DEVICE), q.codes.to(DEVICE), q.scales.to(DEVICE), counter(tokens - 1), tensors(p), int(p.type),
        tensors(second), int(second.type), 256, out,
    )  # fmt: skip
    w = torch.cat([dequantize(p, 0), dequantize(second, 0)]).cpu()
    assert nmse(out[:-1].cpu(), reference(round_trip(x) if tokens <= INT8_TOKENS else x, w)[:-1]) < 1e-7
    assert (out[-1] == GUARD).all()


@pytest.mark.parametrize("tokens", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 70))])
@pytest.mark.parametrize(
    "kinds", [(weights.Type.Q4_K, weights.Type.Q6_K), (weights.Type.F16, weights.Type.F32)]
)
def test_bias(kinds: tuple[weights.Type, weights.Type], tokens: int) -> None:
    """By every method (integer dots, sliced K, tensor cores, floats), of one matrix and of two."""
    first, second = planes_of(kinds[0], 40, 256), planes_of(kinds[1], 24, 256)
    x, bias = activations("gaussian", tokens, 256).half(), torch.randn(64) * 3
    q = quantize(x.float())
    is_small = tokens <= INT8_TOKENS
    inputs = (x.to(DEVICE), q.codes.to(DEVICE), q.scales.to(DEVICE), counter(tokens - 1))
    w = torch.cat([dequantize(first, 0), dequantize(second, 0)]).cpu()
    expected = reference(round_trip(x) if is_small and first.quantised else x, w, bias)
    out = torch.full((tokens, 64), GUARD, device=DEVICE)
    more = (tensors(second), int(second.type))
    linear(*inputs, tensors(first), int(first.type), *more, 256, out, bias=bias.to(DEVICE))
    assert nmse(out[:-1].cpu(), expected[:-1]) < 1e-7
    assert (out[-1] == GUARD).all()
    alone = torch.full((tokens, 40), GUARD, device=DEVICE)
    linear(*inputs, tensors(first), int(first.type), None, 0, 256, alone, bias=bias[:40].to(DEVICE))
    assert torch.equal(alone[:-1], out[:-1, :40])


@pytest.mark.parametrize(
    ("rows", "cols", "tokens"), [(24, 320, 19), (128, 96, 17), (5, 640, 33), (70, 96, 530)]
)
def test_a_router_of_many_tokens_keeps_the_precision_of_float32(rows: int, cols: int, tokens: int) -> None:
    p = planes_of(weights.Type.F32, rows, cols)
    x = activations("outlier channels", tokens, cols)
    got = run(p, x, tokens - 1, integer=False)
    assert nmse(got, reference(x, dequantize(p, 0).cpu())[:-1]) < 1e-12


@pytest.mark.parametrize("rows", [24, 130])
def test_a_router_of_thousands_of_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than in use."""
    monkeypatch.setattr("moeserve.kernels.linear.op.WIDE_TOKENS", 512)
    p, x = planes_of(weights.Type.F32, rows, 96), activations("outlier channels", 530, 96)
    out = torch.full((530, rows), GUARD, device=DEVICE)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    launched: list[object] = []
    monkeypatch.setattr("moeserve.kernels.linear.op.run_gemm", lambda *args, **_: launched.append(args))
    linear(
        x.to(DEVICE),
        None,
        None,
        counter(529),
        tensors(p),
        int(p.type),
        None,
        0,
        96,
        out,
        bias=bias.to(DEVICE),
    )
    assert not launched
    assert nmse(out[:-1].cpu(), reference(x, dequantize(p, 0).cpu(), bias)[:-1]) < 1e-12
    assert (out[-1] == GUARD).all()


def test_large_tiles() -> None:
    p = planes_of(weights.Type.Q6_K, 130, 512)
    x = activations("gaussian", 70, 512).half()
    out = torch.full((70, 130), GUARD, device=DEVICE)
    weight = weight_of(tensors(p), int(p.type), p.cols)
    tile = GemmTile(64, 128, 2, 8, 2)
    run_gemm(x.to(DEVICE), weight, None, None, counter(70), out, tile=tile)
    assert nmse(out.cpu(), reference(x, dequantize(p, 0).cpu())) < 1e-7


@pytest.mark.parametrize(
    "tile",
    [
        (8, 32, 4, 4, 2),
        (8, 32, 8, 8, 2),
        pytest.param((16, 64, 2, 4, 2), marks=pytest.mark.slow),
        pytest.param((32, 32, 2, 4, 3), marks=pytest.mark.slow),
        (16, 32, 8, 8, 2),
        pytest.param((16, 64, 8, 16, 2), marks=pytest.mark.slow),
        pytest.param((16, 32, 16, 16, 1), marks=pytest.mark.slow),
    ],
)
def test_batches_of_units(tile: tuple[int, int, int, int, int]) -> None:
    """More units than columns, rows in blocks, rows and tokens that fill no tile. Up to 16
    tokens at once weights stay exact; before more they are rounded to float16."""
    p = planes_of(weights.Type.Q6_K, 70, 768)
    x = activations("gaussian", 19, 768).half()
    out = torch.full((20, 70), GUARD, device=DEVICE)
    weight = weight_of(tensors(p), int(p.type), p.cols)
    run_gemm(x.to(DEVICE), weight, None, None, counter(19), out[:19], tile=GemmTile(*tile, sliced_k=True))
    largest = 1e-11 if tile[0] <= 16 else 1e-7
    assert nmse(out[:19].cpu(), reference(x, dequantize(p, 0).cpu())) < largest
    assert (out[19] == GUARD).all()


@pytest.mark.parametrize("kind", GPU_TYPES, ids=lambda t: t.name)
def test_embedding(kind: weights.Type) -> None:
    cols = {256: 768, 128: 384, 64: 192}.get(QUANT_TYPES[kind].block_columns, 96)
    p = planes_of(kind, 9, cols)
    x = torch.full((3, cols), GUARD, device=DEVICE)
    embed(ints([8, 0, 5]), counter(2), tensors(p), int(p.type), x)
    assert torch.equal(x[:2].cpu(), dequantize(p, 0).cpu()[[8, 0]])
    assert (x[2] == GUARD).all()


def test_ids_and_places_that_do_not_exist_touch_no_other_memory() -> None:
    p = planes_of(weights.Type.Q4_K, 9, 768)
    room = torch.full((6, 5), -7, dtype=torch.int32, device=DEVICE)
    x = torch.full((6, 768), GUARD, device=DEVICE)
    ids = [-1, EMBEDDED, 9, 2**31 - 1, 3, 4]
    places = KvPlaces(room[1:5], ints([-1, 4, 0, 1, 2, 3]), ints([0, 0, 5, -1, 2**31 - 1, 4]), ints([70] * 6))
    embed(ints(ids), counter(6), tensors(p), int(p.type), x, places)
    assert (x[1] == GUARD).all()  # an embedding is there already
    given = [0, 2, 3, 4, 5]
    assert torch.equal(x[given].cpu(), dequantize(p, 0).cpu()[[0, 8, 8, 3, 4]])
    expected = torch.full((6, 5), -7, dtype=torch.int32)
    expected[4, 4] = 70
    assert torch.equal(room.cpu(), expected)


def test_embedding_notes_where_the_kv_of_windowed_layers_goes() -> None:
    p, x = planes_of(weights.Type.Q4_K, 9, 768), torch.empty(3, 768, device=DEVICE)
    table, windows = (torch.full((4, 5), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    places = KvPlaces(
        *(table, ints([2, 0, 7]), ints([4, 1, 3]), ints([70, 71, 72])), *(windows, ints([30, 31, 32]))
    )
    embed(ints([8, 0, 5]), counter(3), tensors(p), int(p.type), x, places)
    for found, first in ((table, 70), (windows, 30)):
        expected = torch.full((4, 5), -7, dtype=torch.int32)
        expected[2, 4], expected[0, 1] = first, first + 1  # there is no request slot 7
        assert torch.equal(found.cpu(), expected)


def test_embedding_notes_where_the_kv_goes() -> None:
    p, x = planes_of(weights.Type.Q4_K, 9, 768), torch.empty(3, 768, device=DEVICE)
    table = torch.full((4, 5), -7, dtype=torch.int32, device=DEVICE)
    places = KvPlaces(table, ints([2, 0, 1]), ints([4, 1, 3]), ints([70, 71, 72]))
    embed(ints([8, 0, 5]), counter(2), tensors(p), int(p.type), x, places)
    expected = torch.full((4, 5), -7, dtype=torch.int32)
    expected[2, 4], expected[0, 1] = 70, 71  # the third row does not exist
    assert torch.equal(table.cpu(), expected)
