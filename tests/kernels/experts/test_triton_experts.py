"""Alignment of routes, and whole expert layers against the reference, by every method a batch size takes."""

from __future__ import annotations

import math

import pytest
import torch

from moeserve.quantization import QUANT_TYPES, StoredScales
from moeserve.quantization.table import ZERO_TYPES

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts import op
from moeserve.kernels.experts.reference import activate
from moeserve.kernels.experts.reference import experts as reference
from moeserve.kernels.experts.reference import shared_gate as gate_reference
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up, up_tile
from moeserve.kernels.gating import Activation
from moeserve.kernels.linear.op import GemvTile
from moeserve.kernels.linear.operands import Gated, weight_of
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.planes import dequantize
from moeserve.kernels.quantize.reference import quantize, round_trip
from tests.kernels.experts.triton_experts import random_ids, widened
from tests.kernels.quantization.plane_tensors import planes_of, tensors
from tests.kernels.weights import GPU_INTEGERS, Type, nmse
from tests.support.models.ggml_types import ggml_type


@pytest.mark.parametrize(
    ("n", "experts", "top_k", "block"),
    [(1, 128, 8, 4), (40, 7, 3, 4), (150, 8, 8, 16), (9, 5, 1, 64), (2052, 16, 8, 128)],
)
def test_alignment(n: int, experts: int, top_k: int, block: int) -> None:
    check_alignment(n, experts, top_k, block)


@pytest.mark.parametrize(("n", "experts", "block"), [(1100, 16, 128), (1025, 130, 16)])
def test_alignment_of_counted_routes(
    n: int, experts: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than in use; chunks whose counts are summed at once and later."""
    monkeypatch.setattr(op, "COUNTED_ROUTES", 8192)
    monkeypatch.setattr(op, "SUMMED", 8)
    shape = op.counts_shape(n * 8, experts)
    assert shape is not None
    check_alignment(n, experts, 8, block, torch.full(shape, -7, dtype=torch.int32, device=DEVICE))


def check_alignment(n: int, experts: int, top_k: int, block: int, counts: torch.Tensor | None = None) -> None:
    """Every live route in one block, its expert's, in order; nothing else anywhere."""
    live = max(1, n - 2)
    ids = random_ids(n, experts, top_k)
    ids[0, 0] = -1  # an expert that is elsewhere
    blocks = op.num_blocks(n, top_k, experts, block)
    expert = torch.full((blocks,), -7, dtype=torch.int32, device=DEVICE)
    routes = torch.full((blocks, block), -7, dtype=torch.int32, device=DEVICE)
    op.align_routes(ids.to(DEVICE), counter(live), experts, expert, routes, counts)
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
    activation: Activation = "silu",
    biased: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert layer by a method, and its reference. One expert more than are chosen, the last row not live. Ids and
    weights are columns of wider tensors, and so are the parts."""
    experts, live = top_k + 1, max(1, n - 1)
    ff = max(ff, QUANT_TYPES[kinds[2]].block_columns)
    gate, up = planes_of(kinds[0], experts, ff, hidden), planes_of(kinds[1], experts, ff, hidden)
    down = planes_of(kinds[2], experts, hidden, ff)
    x = torch.randn(n, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = random_ids(n, experts, top_k)
    ids[0, -1] = -1
    weights = torch.rand(n, top_k, generator=torch.Generator().manual_seed(2))
    g = torch.Generator().manual_seed(3)
    biases = [torch.randn(experts, rows, generator=g) for rows in (ff, ff, hidden)]
    of_gate, of_up, of_down = (b.to(DEVICE) if biased else None for b in biases)
    options = Gated(activation, of_gate, of_up)
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
        small_batch_up(*xs, *matrices, widened(ids_there), h.x, h.codes, h.scales, options=options)
        small_batch_down(
            h.x, h.codes, h.scales, tensors(down), int(down.type), ff, widened(ids_there), widened(weights),
            counter(live), out, adds=True, bias=of_down,
        )  # fmt: skip
        assert (out[live:] == 1).all()
        got = out.cpu()[:live] - 1
    else:
        assert h.x is not None
        blocks = op.num_blocks(n, top_k, experts, method.block)
        block_expert = torch.empty(blocks, dtype=torch.int32, device=DEVICE)
        block_routes = torch.empty(blocks, method.block, dtype=torch.int32, device=DEVICE)
        op.align_routes(widened(ids), counter(live), experts, block_expert, block_routes)
        parts = widened(torch.zeros(n, top_k, hidden))
        op.experts_up(xs[0], *matrices, block_expert, block_routes, top_k, h.x, options=options)
        op.experts_down(
            h.x, tensors(down), int(down.type), ff, block_expert, block_routes, counter(live), parts, bias=of_down
        )  # fmt: skip
        assert (parts._base[:, top_k:] == 77).all()  # type: ignore[index]
        got = (parts.cpu() * weights[..., None] * there).sum(1)[:live]
    through = [round_trip if gemv and p.quantised else torch.Tensor.double for p in (gate, up, down)]
    expected = reference(
        x[:live].float(), dequantize(gate).cpu(), dequantize(up).cpu(), dequantize(down).cpu(), ids[:live].clamp(min=0),
        weights[:live] * there[:live, :, 0], *through, activation=activation,
        **(dict(zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True)) if biased else {}),
    )  # fmt: skip
    return got, expected


MIX = (Type.Q4_K, Type.Q4_K, Type.Q6_K)


OTHERS = (Type.Q8_0, Type.MXFP4, Type.Q5_0)
SMALL_GROUPS = (Type.NVFP4, Type.NVFP4, Type.Q6_K)
# With codebooks: gate and up read activations in one order and in two; and scales of more than 32 columns.
LOOKED_UP = [
    (Type.IQ2_XXS, Type.IQ3_S, Type.IQ1_M),
    (Type.Q4_K, Type.IQ2_XS, Type.IQ2_S),
    (Type.TQ2_0, ggml_type(int(ZERO_TYPES[4, 64, StoredScales.F16_ZERO])), ggml_type(41)),
]
FLOATS = [(Type.F16, Type.Q4_K, Type.F16), (Type.Q4_K, Type.F32, Type.Q8_0)]


@pytest.mark.parametrize(
    ("kinds", "tokens"),
    [
        (MIX, 1),
        (SMALL_GROUPS, 2),
        (LOOKED_UP[0], 2),
        *(pytest.param(kinds, 2, marks=pytest.mark.slow) for kinds in LOOKED_UP[1:]),
        pytest.param(MIX, 8, marks=pytest.mark.slow),
        pytest.param(OTHERS, 8, marks=pytest.mark.slow),
        *((kinds, 2) for kinds in FLOATS),
    ],
)
def test_gemv(kinds: tuple[Type, Type, Type], tokens: int) -> None:
    """The method of `tokens` rows, on a few. A code of h may round the other way where a value lies between two: 1e-6
    of the power."""
    got, expected = run(kinds, min(tokens, 5), op.method_for(tokens))
    assert nmse(got, expected) < 1e-5


@pytest.mark.slow
def test_up_of_more_units_than_threads_take_at_once() -> None:
    """Nine units of columns, of which it takes eight at once."""
    got, expected = run(OTHERS, 5, op.method_for(8), hidden=1056, ff=32, top_k=1)
    assert nmse(got, expected) < 1e-5


@pytest.mark.slow
def test_up_of_few_tokens_in_passes() -> None:
    """17 K blocks: 32 threads would have 15 of them for nothing."""
    got, expected = run(OTHERS, 4, op.method_for(4), hidden=2080, ff=32, top_k=1)
    assert nmse(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("cols", "tokens", "expected"),
    [
        (2880, 1, (8, 4, 4096, 8)),
        (2880, 2, (16, 2, 1024, 4)),  # gpt-oss-20b: 3 x 8 instead of 32 for 23 K blocks
        (2880, 8, (16, 2, 1024, 4)),
        (2048, 1, (16, 2, 2048, 8)),
        (4096, 1, (8, 4, 4096, 8)),
        (4096, 5, (16, 2, 1024, 4)),
        (1280, 1, (16, 2, 2048, 8)),  # 10 K blocks: twice eight would be no fewer than 16
        (512, 1, (64, 2, 512, 8)),
    ],
)
def test_tiles_of_gate_and_up(cols: int, tokens: int, expected: tuple[int, int, int, int]) -> None:
    planes = planes_of(Type.MXFP4, 1, 32, cols)
    weight = weight_of(tensors(planes), int(planes.type), cols)
    assert up_tile(weight, weight, tokens) == GemvTile(*expected)


@pytest.mark.slow
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
        pytest.param(MIX, 64, marks=pytest.mark.slow),
        pytest.param(OTHERS, 64, marks=pytest.mark.slow),
        *(pytest.param(kinds, 64, marks=pytest.mark.slow) for kinds in LOOKED_UP),
        pytest.param(MIX, 128, marks=pytest.mark.slow),
        (MIX, 256),
        pytest.param(MIX, 1024, marks=pytest.mark.slow),
        pytest.param(OTHERS, 1024, marks=pytest.mark.slow),
        pytest.param(FLOATS[0], 1024, marks=pytest.mark.slow),
        pytest.param(FLOATS[1], 256, marks=pytest.mark.slow),
    ],
)
def test_gemm(kinds: tuple[Type, Type, Type], tokens: int) -> None:
    """The method of `tokens` rows, on a few; float16 activations, weights and products."""
    got, expected = run(kinds, 9, op.method_for(tokens), dtype=torch.float16)
    assert nmse(got, expected) < 1e-6


def has_fields(kind: Type) -> bool:
    layout = QUANT_TYPES[kind].layout
    return layout is not None and layout.slices_k


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no assembly")
@pytest.mark.parametrize("tokens", [64, 128, 256, 1024])
@pytest.mark.parametrize("kinds", [MIX, OTHERS, *((kind,) * 3 for kind in GPU_INTEGERS if has_fields(kind))])
def test_weights_in_pairs(kinds: tuple[Type, Type, Type], tokens: int) -> None:
    """bfloat16 activations and weights; both products together have twice the error of one."""
    got, expected = run(kinds, 9, op.method_for(tokens), dtype=torch.bfloat16, ff=256)
    assert nmse(got, expected) < 1e-4


@pytest.mark.slow  # of no model that is served yet
@pytest.mark.parametrize(
    ("kinds", "tokens"), [(OTHERS, 2), (FLOATS[0], 2), (MIX, 64), (MIX, 256), (FLOATS[1], 256)]
)
def test_biases_and_gpt_oss_activation(kinds: tuple[Type, Type, Type], tokens: int) -> None:
    """Both ways of computing, with quantised matrices and floats, by units of columns and not."""
    few = op.method_for(tokens).up is None
    dtype = torch.float32 if few else torch.float16
    got, expected = run(
        kinds, 5, op.method_for(tokens), dtype=dtype, hidden=256, activation="swiglu_oai", biased=True
    )
    assert nmse(got, expected) < (1e-5 if few else 1e-6)


def test_gpt_oss_activation_clamps() -> None:
    gate, up = torch.tensor([9.0, -9.0, 7.0]), torch.tensor([8.0, -8.0, 0.0])
    clamped = activate(torch.tensor([7.0, -9.0, 7.0]), torch.tensor([7.0, -7.0, 0.0]), "swiglu_oai")
    assert torch.equal(activate(gate, up, "swiglu_oai"), clamped)
    assert clamped[2] == pytest.approx(7 / (1 + math.exp(-1.702 * 7)))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_shared_expert_is_one_part_more(tokens: int) -> None:
    """Routed and shared experts of different widths: few tokens have one sum, to which the shared expert is added by
    its gate; many have a part for each route and one for it, which the next norm weighs and adds."""
    hidden, ff, shared_ff, experts, top_k, live = 256, 64, 96, 5, 2, tokens - 1
    kind = Type.Q5_0
    routed = [planes_of(kind, experts, *shape) for shape in ((ff, hidden), (ff, hidden), (hidden, ff))]
    up, down = (shared_ff, hidden), (hidden, shared_ff)
    shared = [planes_of(kind, 1, *shape) for shape in (up, up, down)]
    g = torch.Generator().manual_seed(1)
    x, gate = torch.randn(tokens, hidden, generator=g).half(), torch.randn(hidden, generator=g) / 16
    residual, gain = torch.randn(tokens, hidden, generator=g), torch.rand(hidden, generator=g)
    ids, weights = random_ids(tokens, experts, top_k), torch.rand(tokens, top_k, generator=g)
    all_ids = torch.full((tokens, top_k + 1), -7, dtype=torch.int32, device=DEVICE)
    all_weights = torch.full((tokens, top_k + 1), 77.0, device=DEVICE)
    all_ids[:, :top_k], all_weights[:, :top_k] = ids.to(DEVICE), weights.to(DEVICE)
    all_ids[live:] = -1
    count, q = counter(live), quantize(x.float())
    op.shared_gate(x.to(DEVICE), gate.to(DEVICE), count, all_weights[:, top_k], all_ids[:, top_k])

    small_batch = op.method_for(tokens).up is None
    parts = torch.zeros(tokens, 1 if small_batch else top_k + 1, hidden, device=DEVICE)
    method = op.method_for(tokens)
    for matrices, columns in ((routed, slice(0, top_k)), (shared, slice(top_k, None))):
        k, num, width = len(range(top_k + 1)[columns]), matrices[0].experts, matrices[0].rows
        my_ids, my_weights = all_ids[:, columns], all_weights[:, columns]
        of_up = [a for p in matrices[:2] for a in (tensors(p), int(p.type))]
        of_down = (tensors(matrices[2]), int(kind), width)
        h = GpuActivations.empty(
            tokens * k, width, DEVICE, dtype=None if small_batch else torch.float16, quantised=small_batch
        )
        if small_batch:
            small_batch_up(
                None, q.codes.to(DEVICE), q.scales.to(DEVICE), *of_up, hidden, my_ids, h.x, h.codes, h.scales
            )  # fmt: skip
            small_batch_down(
                h.x, h.codes, h.scales, *of_down, my_ids, my_weights, count, parts[:, 0], adds=matrices is shared
            )  # fmt: skip
            continue
        assert h.x is not None
        blocks = op.num_blocks(tokens, k, num, method.block)
        block_expert = torch.empty(blocks, dtype=torch.int32, device=DEVICE)
        block_routes = torch.empty(blocks, method.block, dtype=torch.int32, device=DEVICE)
        op.align_routes(my_ids, count, num, block_expert, block_routes)
        op.experts_up(x.to(DEVICE), *of_up, hidden, block_expert, block_routes, k, h.x)
        op.experts_down(h.x, *of_down, block_expert, block_routes, count, parts[:, columns])
    after, y = residual.clone().to(DEVICE), torch.empty(tokens, hidden, device=DEVICE)
    add_norm(
        after, parts, None if small_batch else all_weights, None if small_batch else all_ids, None, None, count,
        gain.to(DEVICE), 1e-6, y, None, None,
    )  # fmt: skip

    through = [round_trip if small_batch else torch.Tensor.double] * 3
    expected = residual[:live] + reference(
        x[:live].float(), *(dequantize(p).cpu() for p in routed), ids[:live], weights[:live], *through
    )
    one, share = torch.zeros(live, 1, dtype=torch.int32), gate_reference(x[:live], gate)
    expected += reference(x[:live].float(), *(dequantize(p).cpu() for p in shared), one, share, *through)
    assert nmse(after[:live].cpu(), expected) < 1e-6
    assert nmse(y[:live].cpu(), norm(expected, gain, 1e-6)) < 1e-6
    assert torch.equal(after[live:].cpu(), residual[live:])
