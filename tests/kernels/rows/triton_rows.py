"""Rows with guards behind them, and norms of rows."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.quantize.reference import quantize
from tests.kernels.weights import nmse

EPS = 1e-6
GUARD = 12345.0


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_norm(y: GpuActivations, expected: torch.Tensor, live: int) -> None:
    assert y.x is not None
    assert y.codes is not None
    assert y.scales is not None
    assert nmse(y.x[:live].cpu(), expected) < 1e-12
    assert (y.x[live:] == GUARD).all()
    q = quantize(expected.float())
    assert (y.codes[:live].cpu().int() - q.codes).abs().max() <= 1  # a code apart where x lies between two
    assert (y.codes[:live].cpu() != q.codes).float().mean() < 0.01
    assert torch.allclose(y.scales[:live].cpu(), q.scales, rtol=1e-5)


def guarded(rows: int, cols: int) -> GpuActivations:
    y = GpuActivations.empty(rows, cols, DEVICE, dtype=torch.float32, quantised=True)
    assert y.x is not None
    y.x.fill_(GUARD)
    return y
