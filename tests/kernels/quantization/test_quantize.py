"""int8 activations: the kernels' bits are the reference's, on rows of every kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moeserve.kernels import _C
from moeserve.kernels.quantize.reference import quantize, round_trip
from tests.kernels.operations import ISAS, run_norm, stream_of
from tests.kernels.weights import ACTIVATIONS, activations, nmse


def normal(x: torch.Tensor) -> torch.Tensor:
    """The pool's threads count denormal numbers as zero."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def quantised_by_kernel(isa: str, row: torch.Tensor) -> torch.Tensor:
    """The quantiser runs inside other operations; a norm of ones, with the row as its weight, is the row itself."""
    y = run_norm(stream_of(isa), torch.ones(1, len(row)), row, 0.0)
    assert torch.equal(y.f32[0], normal(row))
    return y.q8[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("distribution", ACTIVATIONS)
def test_same_bits_as_the_reference(isa: str, distribution: str) -> None:
    for scale in (1e-30, 1e-3, 1.0, 1e30):
        for row in activations(distribution, 20, 768) * scale:
            assert torch.equal(quantised_by_kernel(isa, row), quantize(row[None]).rows()[0])


def special_rows() -> list[torch.Tensor]:
    one_column = torch.zeros(64)
    one_column[37] = -3.5
    ties = torch.arange(-32, 32) + 0.5  # with a largest of 127 every one lies between two codes
    ties[0] = ties[32] = 127.0
    halves = torch.cat([torch.full((32,), 5.0), torch.zeros(32)])
    tiny = torch.linspace(-1, 1, 64)
    return [
        torch.zeros(64),
        one_column,
        ties,
        halves,
        -halves,
        torch.full((64,), 3e38),
        *(tiny * scale for scale in (2e-30, 1e-30, 1e-37, 1e-40, 1e-45)),
    ]


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_ties_and_single_columns(isa: str) -> None:
    for row in special_rows():
        expected = quantize(normal(row[None]))
        expected = replace(expected, scales=normal(expected.scales))
        assert torch.equal(quantised_by_kernel(isa, row), expected.rows()[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_broken_value_breaks_its_group(isa: str, bad: float) -> None:
    """Wherever it stands: the maximum over a vector may skip NaN. The other groups stay whole."""
    for column in (0, 5, 15, 16, 23, 31):
        row = activations("gaussian", 1, 96)[0]
        row[32 + column] = bad
        y = run_norm(stream_of(isa), torch.ones(1, 96), row, 0.0)
        scales = y.q8[0, 96:].view(torch.float32)[::4]
        assert scales.isnan().tolist() == [False, True, False]
        assert torch.equal(scales.isnan(), quantize(row[None]).scales[0].isnan())


def test_the_reference_is_what_the_layout_says() -> None:
    """By hand: 64 columns, the first group 0..31 scaled so that code = value, the second zero."""
    x = torch.zeros(1, 64)
    x[0, :32] = torch.arange(32)
    x[0, 31] = 127.0
    row = quantize(x).rows()[0].numpy()
    assert len(row) == _C.quantized_row_bytes(64) == 96
    assert row[:64].view(np.int8).tolist() == [*range(31), 127, *[0] * 32]
    floats, integers = row[64:].view(np.float32), row[64:].view(np.int32)
    low, high = sum(range(16)), sum(range(16, 31)) + 127
    assert floats[[0, 1, 4, 5]].tolist() == [1.0, low + high, 0.0, 0.0]
    assert integers[[2, 3, 6, 7]].tolist() == [low, high, 0, 0]


def test_the_error_that_the_reference_states() -> None:
    assert nmse(round_trip(activations("gaussian", 100, 768)), activations("gaussian", 100, 768)) < 3.2e-5
    worst = torch.rand(4000, 32, generator=torch.Generator().manual_seed(0)) * 0.05
    worst[:, 5] = 1.0  # one column carries the group
    assert 1.4e-4 < nmse(round_trip(worst), worst) < 1.65e-4
