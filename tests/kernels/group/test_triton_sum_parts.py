"""The sum of a token's parts on one of several GPUs."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.experts.sum_parts import sum_parts


def test_parts_of_experts_that_are_here_are_summed() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 4, 96, generator=generator).to(DEVICE)
    weights = torch.rand(3, 4, generator=generator).to(DEVICE)
    ids = ints([[0, -1, 2, 1], [-1, -1, -1, -1], [0, 1, 2, 3]])
    parts[0, 1] = torch.nan  # of an expert elsewhere: never read
    out = torch.full((3, 1, 96), 7.0, device=DEVICE)
    sum_parts(parts, weights, ids, counter(2), out)
    here = [0, 2, 3]
    expected = (parts[0, here] * weights[0, here, None]).sum(0)
    torch.testing.assert_close(out[0, 0], expected)
    assert out[1].eq(0).all()
    assert out[2].eq(7).all()  # no row of the step
