"""A residual of several streams on the CPU pool, beside its specification."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.norm import reference as norm_reference
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.stream_operands import Activations
from moeserve.kernels.streams import attended, reference, sinkhorn
from tests.kernels.operations import ISAS, guarded, stream_of, unguard
from tests.kernels.weights import nmse

STREAMS, EPS = 4, 1e-6
each_isa = pytest.mark.parametrize("isa", ISAS)
# One token is computed by one thread, many by all; the widths are whole and broken blocks of columns.
each_size = pytest.mark.parametrize(("n", "hidden"), [(1, 32), (1, 288), (5, 96), (40, 544)])


@each_isa
@each_size
def test_stream_norm(isa: str, n: int, hidden: int) -> None:
    x, weight = torch.randn(n + 2, STREAMS * hidden), torch.rand(STREAMS, hidden) + 0.5
    rows = torch.arange(n, 0, -1, dtype=torch.int32)
    for chosen in (None, rows):
        out = Activations(n, STREAMS * hidden)
        stream_of(isa).stream_norm(x, weight, EPS, n, out, chosen)
        stream_of(isa).wait()
        of = (x[:n] if chosen is None else x[chosen.long()]).view(n, STREAMS, hidden)
        assert nmse(out.f32, norm_reference.norm(of, weight, EPS).flatten(1)) < 1e-12
        assert torch.equal(out.q8, quantize(out.f32).rows())


@each_isa
@each_size
def test_mix_streams(isa: str, n: int, hidden: int) -> None:
    gate, x, out = torch.randn(n, STREAMS * hidden), Activations(n, STREAMS * hidden), Activations(n, hidden)
    x.f32.normal_()
    stream_of(isa).mix_streams(gate, x, n, out)
    stream_of(isa).wait()
    expected = reference.mix(gate.view(n, STREAMS, hidden), x.f32.view(n, STREAMS, hidden))
    assert nmse(out.f32, expected) < 1e-11
    assert torch.equal(out.q8, quantize(out.f32).rows())


@each_isa
@each_size
def test_inject(isa: str, n: int, hidden: int) -> None:
    block, weights, x = torch.randn(n, hidden), 9 * torch.randn(n, STREAMS), torch.randn(n, STREAMS * hidden)
    found = guarded(n, STREAMS * hidden)
    found[:n] = x
    stream_of(isa).inject(block, weights, n, found)
    stream_of(isa).wait()
    expected = reference.inject(x.view(n, STREAMS, hidden), block, weights).flatten(1)
    assert nmse(unguard(found), expected) < 1e-12


@each_isa
def test_scaled_silu(isa: str) -> None:
    x, out = 9 * torch.randn(3, 64), Activations(3, 64)
    expected = reference.scaled_silu(x, 0.25)
    stream_of(isa).scaled_silu(x, 0.25, 3, out)
    stream_of(isa).wait()
    assert nmse(out.f32, expected) < 1e-11
    assert torch.equal(out.q8, quantize(out.f32).rows())


@each_isa
@each_size
@pytest.mark.parametrize("iterations", [1, 20])
def test_streams_that_are_mixed(isa: str, n: int, hidden: int, iterations: int) -> None:
    values = STREAMS * (2 + STREAMS)
    mix = sinkhorn.SinkhornMix(torch.randn(values), torch.rand(3) + 0.5, EPS, iterations)
    products, norm = 2 * torch.randn(n, values), torch.rand(hidden) + 0.5
    x, block = torch.randn(n, STREAMS * hidden), torch.randn(n, hidden)
    of_streams, stream = x.view(n, STREAMS, hidden), stream_of(isa)
    y, weights = Activations(n, hidden), guarded(n, STREAMS * (1 + STREAMS))
    stream.read_streams(products, x, None, mix, norm, EPS, n, y, weights)
    stream.wait()
    added, mixed = sinkhorn.weights(products, STREAMS, mix)
    assert nmse(y.f32, norm_reference.norm(sinkhorn.read(products, of_streams, mix), norm, EPS)) < 1e-11
    assert torch.equal(y.q8, quantize(y.f32).rows())
    assert nmse(unguard(weights), torch.cat([added, mixed.flatten(1)], dim=1)) < 1e-11
    if iterations == 20:  # which end with the columns
        assert torch.allclose(mixed.sum(dim=1), torch.ones(1, dtype=torch.float64), atol=1e-4)
    expected, found = sinkhorn.add(of_streams, block, added, mixed).flatten(1), x.clone()
    stream.add_streams(block, weights[:n].clone(), n, found)
    stream.wait()
    assert nmse(found, expected) < 1e-11


def test_mixing_weights_of_like_sizes_become_doubly_stochastic() -> None:
    """Sinkhorn's iteration converges: https://doi.org/10.1214/aoms/1177703591. Weights of one matrix differ by at most
    e^2 here; the farther apart they are, the more iterations it takes."""
    values = STREAMS * (2 + STREAMS)
    mix = sinkhorn.SinkhornMix(torch.zeros(values), torch.ones(3), EPS, 20)
    _, mixed = sinkhorn.weights(2 * torch.rand(50, values) - 1, STREAMS, mix)
    for dim in (1, 2):
        assert torch.allclose(mixed.sum(dim=dim), torch.ones(1, dtype=torch.float64), atol=1e-4)


@each_isa
def test_a_head_reads_some_rows_of_streams_that_are_mixed(isa: str) -> None:
    mix = sinkhorn.SinkhornMix(torch.randn(STREAMS), torch.rand(1) + 0.5, EPS, 20)
    rows, x, norm = (
        torch.tensor([4, 0], dtype=torch.int32),
        torch.randn(5, STREAMS * 96),
        torch.rand(96) + 0.5,
    )
    products, y = torch.randn(2, STREAMS), Activations(2, 96)
    stream_of(isa).read_streams(products, x, rows, mix, norm, EPS, 2, y, None)
    stream_of(isa).wait()
    read = sinkhorn.read(products, x[rows.long()].view(2, STREAMS, 96), mix)
    assert nmse(y.f32, norm_reference.norm(read, norm, EPS)) < 1e-11


@each_isa
def test_a_head_reads_the_mean_of_some_rows_streams(isa: str) -> None:
    rows = torch.tensor([4, 0], dtype=torch.int32)
    x, norm, y = torch.randn(5, STREAMS * 96), torch.rand(96) + 0.5, Activations(2, 96)
    stream_of(isa).read_streams(None, x, rows, None, norm, EPS, 2, y, None)
    stream_of(isa).wait()
    mean = x[rows.long()].view(2, STREAMS, 96).double().mean(dim=1)
    assert nmse(y.f32, norm_reference.norm(mean, norm, EPS)) < 1e-11


@each_isa
@each_size
def test_a_block_attends_to_the_first_streams(isa: str, n: int, hidden: int) -> None:
    """Streams of other sizes than 1, because their norm decides; what later streams hold does not count."""
    x, rows = 3 * torch.randn(n + 2, STREAMS * hidden), torch.arange(n, 0, -1, dtype=torch.int32)
    x[:, 3 * hidden :] = torch.nan
    score, norm = 3 * torch.randn(hidden) / hidden**0.5, torch.rand(hidden) + 0.5
    for chosen in (None, rows):
        for num in (1, 3):
            y = Activations(n, hidden)
            stream_of(isa).attend_streams(x, chosen, score, norm, EPS, num, n, y)
            stream_of(isa).wait()
            of = (x[:n] if chosen is None else x[chosen.long()]).view(n, STREAMS, hidden)[:, :num]
            expected = norm_reference.norm(attended.read(of, score, EPS), norm, EPS)
            assert nmse(y.f32, expected) < 1e-11
            assert torch.equal(y.q8, quantize(y.f32).rows())


def test_streams_are_weighed_by_their_directions() -> None:
    """A stream twice as long has the same weight, and counts twice as much."""
    x, score = torch.randn(5, STREAMS, 96), torch.randn(96)
    longer = x * torch.tensor([1.0, 2.0, 0.5, 8.0])[:, None]
    assert torch.allclose(attended.weights(x, score, 0.0), attended.weights(longer, score, 0.0))
    assert torch.equal(attended.weights(x[:, :1], score, 0.0), torch.ones(5, 1, dtype=torch.float64))


@each_isa
@each_size
@pytest.mark.parametrize("add", [True, False])
def test_a_blocks_output_goes_to_one_stream(isa: str, n: int, hidden: int, add: bool) -> None:
    block, x = torch.randn(n, hidden), torch.randn(n, STREAMS * hidden)
    found, expected = guarded(n, STREAMS * hidden), x.clone().view(n, STREAMS, hidden)
    found[:n] = x
    stream_of(isa).put_stream(block, 2, n, found, add=add)
    stream_of(isa).wait()
    expected[:, 2] = expected[:, 2] + block if add else block
    assert torch.equal(unguard(found), expected.flatten(1))


def test_streams_that_do_not_exist_are_refused() -> None:
    x, vector, y = torch.zeros(1, STREAMS * 32), torch.zeros(32), Activations(1, 32)
    for num in (0, STREAMS + 1):
        with pytest.raises(ValueError, match=r"^num"):
            stream_of("plain").attend_streams(x, None, vector, vector, EPS, num, 1, y)
    for index in (-1, STREAMS):
        with pytest.raises(ValueError, match=r"^stream"):
            stream_of("plain").put_stream(torch.zeros(1, 32), index, 1, x, add=True)
