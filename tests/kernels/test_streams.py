"""A residual of several streams on the CPU pool, beside its specification."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.stream_operands import Activations
from moeserve.kernels.streams import reference
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
        assert nmse(out.f32, reference.norm(of, weight, EPS).flatten(1)) < 1e-12
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
