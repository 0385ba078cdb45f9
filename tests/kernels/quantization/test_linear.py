"""Panels times activations: to the bit of what is computed, against the truth, at the extremes, at any batch size."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import LinearGroup
from moeserve.kernels.linear.reference import linear
from moeserve.kernels.quantize.reference import Quantized, round_trip
from moeserve.kernels.stream_operands import Activations
from moeserve.quantization import QUANT_TYPES
from tests.kernels.operations import COSTLY_ISAS, ISAS, head, load, run_linear, stream_of
from tests.kernels.weights import (
    ACTIVATIONS,
    CPU_INTEGERS,
    E8M0_AT,
    FLOAT32_AT,
    MIN_AT,
    SCALE_AT,
    SPREAD_SCALE_AT,
    TYPES,
    Weights,
    activations,
    nmse,
    random_weights,
    set_floats,
    set_half,
    set_spread_half,
)
from tests.support.nightly import nightly_after

TOKENS = [*range(1, 10), 64, 65, 130]
ROWS = [1, 31, 32, 33, 48, 100]

each_isa = pytest.mark.parametrize("isa", ISAS)
each_vector_isa = pytest.mark.parametrize("isa", COSTLY_ISAS)
each_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


@each_vector_isa
@each_type
@pytest.mark.parametrize("cols", nightly_after(2, [256, 768, 512]))
def test_same_activations_same_result(kind: Type, isa: str, cols: int) -> None:
    """Against exact arithmetic on the same int8 activations; and each row's bits at every batch size and raggedness.

    Rounding alone: measured 1e-14 for integer formats (a rounding each 32 columns), 2.4e-13 for floats (each column).
    """
    stream = stream_of(isa)
    weights = random_weights(kind, max(ROWS), cols)
    x = activations("gaussian", max(TOKENS), cols)
    exact = linear(round_trip(x) if weights.integer else x, weights.values())
    loaded = load(x)
    (whole,) = run_linear(stream, loaded, [weights.pack(stream)])
    assert nmse(whole, exact) <= 1e-12
    for rows in ROWS:
        matrix = weights.head(rows).pack(stream)
        for n in TOKENS:
            (out,) = run_linear(stream, head(loaded, n), [matrix])
            assert torch.equal(out, whole[:n, :rows]), (rows, n)


@each_isa
@each_type
def test_panels_alone(kind: Type, isa: str) -> None:
    """The same bits as in the whole product, in the order asked for, -inf behind the last row."""
    stream = stream_of(isa)
    matrix = random_weights(kind, 100, 256).pack(stream)
    x = load(activations("gaussian", 9, 256))
    (whole,) = run_linear(stream, x, [matrix])
    whole = torch.nn.functional.pad(whole, (0, 28), value=-torch.inf)
    for n, panels in ((9, [3, 0]), (1, [1, 2, 3]), (2, [2])):
        out = torch.full((n, 32 * len(panels)), torch.nan)
        stream.linear_panels(x, n, matrix, torch.tensor(panels, dtype=torch.int32), out)
        stream.wait()
        assert torch.equal(out, torch.cat([whole[:n, 32 * p : 32 * p + 32] for p in panels], dim=1))
    with pytest.raises(IndexError, match="panel 4"):
        stream.linear_panels(x, 1, matrix, torch.tensor([4], dtype=torch.int32), out)


# Measured, over all integer types: 2.8 to 3.0e-5, 1.0e-4, 1.3 to 1.5e-4. Floats: 2.6e-13.
GEMM_GATES = {"gaussian": 3.3e-5, "heavy-tailed": 1.2e-4, "outlier channels": 1.65e-4}


@each_isa
@each_type
def test_distance_from_the_truth(kind: Type, isa: str) -> None:
    """The truth: gguf-py's weights, float32 activations, float64 sums."""
    weights, stream = random_weights(kind, 100, 768, centred=True), stream_of(isa)
    values, matrix = weights.values(), weights.pack(stream)
    for distribution in ACTIVATIONS:
        x = activations(distribution, 130, 768)
        (out,) = run_linear(stream, load(x), [matrix])
        gate = GEMM_GATES[distribution] if weights.integer else 1e-12
        assert nmse(out, linear(x, values)) <= gate, distribution


def extreme_weights(kind: Type) -> Weights:
    """256 rows, each of one byte value throughout, so that codes, scales and mins take their extremes together and
    apart; the scales of whole blocks are 1 so that every product is an integer."""
    blocks = np.zeros_like(random_weights(kind, 256, 256).rows.reshape(256, 256 // _block_cols(kind), -1))
    blocks[...] = np.arange(256, dtype=np.uint8)[:, None, None]
    for at in [table[kind] for table in (SCALE_AT, MIN_AT) if kind in table]:
        set_half(blocks, at, np.ones(blocks.shape[:-1]))
    if kind in SPREAD_SCALE_AT:
        set_spread_half(blocks, SPREAD_SCALE_AT[kind], np.ones(blocks.shape[:-1]))
    if kind in FLOAT32_AT:
        set_floats(kind, blocks, np.ones(blocks.shape[:-1]))
    if kind in E8M0_AT:
        blocks[..., E8M0_AT[kind]] = 128
    return Weights(kind, blocks.reshape(256, -1), 256)


def _block_cols(kind: Type) -> int:
    return QUANT_TYPES[kind].block_columns


@each_isa
@pytest.mark.parametrize("kind", CPU_INTEGERS, ids=lambda kind: kind.name)
def test_extremes_are_exact(kind: Type, isa: str) -> None:
    """No 16-bit pair may saturate and no 16-bit sum overflow: integers all through, so equal and not just close.

    Every number of tokens from 1 to all, so that each pattern of activations stands in tiles of every size.
    """
    columns = torch.arange(256)
    patterns = [
        torch.full((256,), 127),
        torch.full((256,), -127),
        *(127 * (-1) ** (columns // width) for width in (1, 2, 4, 16, 32)),
    ]
    if QUANT_TYPES[kind].codebook is None:
        patterns.append(torch.full((256,), -128))  # quantising does not give it, but the bound holds for it
    codes = torch.stack(patterns).to(torch.int8)
    weights, stream = extreme_weights(kind), stream_of(isa)
    matrix = weights.pack(stream)
    for n in range(1, len(codes) + 1):
        x = Quantized(codes.roll(n, 0)[:n], torch.ones(n, 256 // 32))
        room = Activations(n, 256)
        room.q8.copy_(x.rows())
        (out,) = run_linear(stream, room, [matrix])
        exact = linear(x.dequantize(), weights.values())
        assert exact.abs().max() < 2**53
        if QUANT_TYPES[kind].codebook is None:
            assert torch.equal(out, exact.float())
        else:  # scales of five bits times odd magnitudes: sums of a row have more bits than a float32
            assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-22).all()


@each_isa
@pytest.mark.parametrize("kind", E8M0_AT, ids=lambda kind: kind.name)
def test_every_exponent_is_a_power_of_two(kind: Type, isa: str) -> None:
    """A row of each. Those of the first two are denormal, which the pool's threads may take for zero."""
    blocks = np.zeros((256, QUANT_TYPES[kind].block_bytes), np.uint8)
    blocks[:, E8M0_AT[kind]] = np.arange(256)
    blocks[:, E8M0_AT[kind] + 1 :] = 0x22  # every weight twice the scale
    columns = _block_cols(kind)
    stream = stream_of(isa)
    room = Activations(1, columns)
    room.q8.copy_(Quantized(torch.ones(1, columns, dtype=torch.int8), torch.ones(1, columns // 32)).rows())
    (out,) = run_linear(stream, room, [Weights(kind, blocks, columns).pack(stream)])
    expected = 2.0 * columns * 2.0 ** (torch.arange(256, dtype=torch.float64) - 128)
    assert torch.equal(out[0, 2:], expected[2:].float())
    assert all(value in (0, exact) for value, exact in zip(out[0, :2].double(), expected[:2], strict=True))


@each_isa
def test_a_group_of_matrices_and_a_residual(isa: str) -> None:
    """Q, K and V in one call: other types, other numbers of rows, one input; and added to what is there."""
    stream, x = stream_of(isa), activations("gaussian", 9, 512)
    group = [random_weights(k, rows, 512) for k, rows in ((Type.Q4_K, 96), (Type.F32, 40), (Type.Q6_K, 1))]
    matrices = [w.pack(stream) for w in group]
    together = run_linear(stream, load(x), matrices)
    residual = [activations("gaussian", 9, w.shape[0]) for w in group]
    added = run_linear(stream, load(x), matrices, residual)
    for i, matrix in enumerate(matrices):
        assert torch.equal(together[i], run_linear(stream, load(x), [matrix])[0])
        assert torch.equal(added[i], residual[i] + together[i])


@each_isa
def test_biases(isa: str) -> None:
    """Exactly the product plus the bias, also added to a residual; a matrix of the group may have none."""
    stream, x = stream_of(isa), activations("gaussian", 67, 512)
    group = [random_weights(k, rows, 512) for k, rows in ((Type.Q4_K, 96), (Type.F32, 40), (Type.Q6_K, 33))]
    matrices, biases = [w.pack(stream) for w in group], [torch.randn(96), None, torch.randn(33)]
    products = run_linear(stream, load(x), matrices)
    residual = [activations("gaussian", 67, w.shape[0]) for w in group]
    biased = run_linear(stream, load(x), matrices, biases=biases)
    added = run_linear(stream, load(x), matrices, residual, biases)
    for i, bias in enumerate(biases):
        expected = products[i] if bias is None else products[i] + bias
        assert torch.equal(biased[i], expected)
        assert torch.equal(added[i], residual[i] + expected)
        seen = round_trip(x) if group[i].integer else x
        assert nmse(biased[i], linear(seen, group[i].values(), bias)) <= 1e-12


@each_isa
def test_biases_in_any_batch_and_on_any_threads(isa: str) -> None:
    weights, x, bias = (
        random_weights(Type.Q4_K, 70, 256),
        load(activations("gaussian", 67, 256)),
        torch.randn(70),
    )
    (whole,) = run_linear(stream_of(isa, 1), x, [weights.pack(stream_of(isa, 1))], biases=[bias])
    for n, threads in ((1, 3), (3, 2), (64, 3), (67, 2)):
        stream = stream_of(isa, threads)
        (part,) = run_linear(stream, head(x, n), [weights.pack(stream)], biases=[bias])
        assert torch.equal(part, whole[:n])


def test_biases_outlive_what_the_caller_does_to_the_list() -> None:
    stream, x = stream_of("plain"), load(activations("gaussian", 1, 32))
    matrix, bias = random_weights(Type.F32, 32, 32).pack(stream), torch.randn(32)
    biases: list[torch.Tensor | None] = [bias.clone()]
    group, out = LinearGroup([matrix], biases), torch.empty(1, 32)
    biases[0] = None
    gc.collect()
    stream.linear(x, 1, group, [out])
    stream.wait()
    assert torch.equal(out, run_linear(stream, x, [matrix], biases=[bias])[0])


@pytest.mark.parametrize("count", [0, 7])
def test_a_group_has_one_to_six_matrices(count: int) -> None:
    matrix = random_weights(Type.Q8_0, 32, 32).pack(stream_of("plain"))
    with pytest.raises(ValueError, match="one to six"):
        LinearGroup([matrix] * count)


@each_isa
@each_type
def test_threads_do_not_change_a_bit(kind: Type, isa: str) -> None:
    weights, x = random_weights(kind, 100, 256), load(activations("heavy-tailed", 9, 256))
    results = [run_linear(s, x, [weights.pack(s)])[0] for s in (stream_of(isa, t) for t in (1, 2, 3))]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("cols", [32, 96, 160])
@pytest.mark.parametrize("kind", [k for k in TYPES if _block_cols(k) <= 32], ids=lambda kind: kind.name)
def test_rows_of_few_columns(kind: Type, cols: int) -> None:
    """Shorter than what is fetched ahead, and no multiple of 256."""
    weights, x = random_weights(kind, 33, cols), activations("gaussian", 5, cols)
    exact = linear(round_trip(x) if weights.integer else x, weights.values())
    for isa in ISAS:
        stream = stream_of(isa)
        assert nmse(run_linear(stream, load(x), [weights.pack(stream)])[0], exact) <= 1e-12
