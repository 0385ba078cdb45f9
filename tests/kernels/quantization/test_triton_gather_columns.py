"""Activations in the order of a matrix's columns, by row and by route."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.linear.gather_columns import gather_columns
from moeserve.kernels.quantize.reference import quantize

COLS = 96  # no power of two
GUARD = 7.0


def orders(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(COLS, generator=generator) for _ in range(count)]).int()


def guarded(rows: int, *, quantised: bool) -> GpuActivations:
    y = GpuActivations.empty(rows, COLS, DEVICE, dtype=torch.float32, quantised=quantised)
    for part in (y.x, y.codes, y.scales):
        if part is not None:
            part.fill_(GUARD)
    return y


@pytest.mark.parametrize("quantised", [True, False])
def test_rows_are_gathered_and_rounded_in_their_order(quantised: bool) -> None:
    x, order = torch.randn(3, COLS, generator=torch.Generator().manual_seed(1)), orders(1)[0]
    y = guarded(3, quantised=quantised)
    gather_columns(x.to(DEVICE), order.to(DEVICE), counter(2), y)
    assert y.x is not None
    assert torch.equal(y.x[:2].cpu(), x[:2, order.long()])
    assert y.x[2].eq(GUARD).all()  # no row of the step
    if quantised:
        expected = quantize(x[:2, order.long()])
        assert y.codes is not None
        assert y.scales is not None
        assert torch.equal(y.codes[:2].cpu(), expected.codes)
        torch.testing.assert_close(y.scales[:2].cpu(), expected.scales)


def test_a_route_has_the_order_of_its_expert() -> None:
    """Columns of a wider tensor of ids; an expert may be on no device."""
    x, order = torch.randn(2, COLS, generator=torch.Generator().manual_seed(2)), orders(3)
    ids = ints([[2, 0, 1], [-1, 2, 0]])[:, :2]
    y = guarded(4, quantised=False)
    gather_columns(x.to(DEVICE), order.to(DEVICE), counter(2), y, ids)
    assert y.x is not None
    found = y.x.cpu()
    for row, (token, expert) in enumerate([(0, 2), (0, 0), (1, -1), (1, 2)]):
        expected = torch.full((COLS,), GUARD) if expert < 0 else x[token, order[expert].long()]
        assert torch.equal(found[row], expected)
