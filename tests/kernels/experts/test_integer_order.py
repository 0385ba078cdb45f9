"""Activations for experts with weights as integers in float16: order, sums and factors."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.linear.integers import IntegerRows, integer_order


def columns(cols: int) -> torch.Tensor:
    """Which column is at each place: for each word its low nibbles, then the high ones; of those the word's even bytes
    (in pairs, of the four parts in turn), then the odd ones."""
    order = []
    for k_block in range(cols // 128):
        for word in range(4):
            for nibble in range(2):
                for odd in range(2):
                    for part in range(4):
                        first = k_block * 128 + (2 * part + nibble) * 16 + 4 * word
                        order += [first + odd, first + 2 + odd]
    return torch.tensor(order)


@pytest.mark.parametrize("cols", [256, 768])
def test_order_sums_and_factors(cols: int) -> None:
    """For numbers far beyond float16's, and far below; rows behind the count stay as they were."""
    size = torch.tensor([1e-30, 1e-6, 1.0, 3e4, 1e30, 0.0, 1.0])[:, None]
    x = (torch.randn(7, cols, generator=torch.Generator().manual_seed(cols)) * size).to(DEVICE)
    out = IntegerRows(
        torch.full((7, cols), -7.0, dtype=torch.float16, device=DEVICE),
        torch.full((7, cols // 16), -7.0, dtype=torch.float16, device=DEVICE),
        torch.full((7,), -7.0, device=DEVICE),
    )
    integer_order(x, counter(3), out, top_k=2)
    assert torch.equal(columns(cols).sort().values, torch.arange(cols))
    expected = x[:6, columns(cols).to(DEVICE)]
    found = out.x[:6].float() * out.factors[:6, None]
    assert (
        (found - expected).abs() <= expected.abs() * 2.0**-11 + x[:6].abs().amax(1, keepdim=True) * 2.0**-34
    ).all()
    assert out.x[:6].isfinite().all()
    in_place = torch.empty_like(out.x[:6])
    in_place[:, columns(cols).to(DEVICE)] = out.x[:6]
    sums = out.sums[:6].float().view(6, cols // 256, 2, 8).sum(2).view(6, cols // 32)
    exact = in_place.double().view(6, -1, 32).sum(2)
    assert (sums - exact).abs().max() <= 2.0**-7  # of up to 2^15: two float16 hold 22 bits
    for left in (out.x, out.sums, out.factors):
        assert (left[6] == -7).all()
