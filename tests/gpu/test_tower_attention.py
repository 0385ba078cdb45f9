"""A picture's attention by Hopper's warpgroups is as near to float64 as torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moeserve.kernels.tower.attention import attention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


@pytest.mark.parametrize(
    ("patches", "heads", "dim"),
    [(4, 2, 72), (100, 16, 72), (129, 3, 80), (577, 16, 72), (1024, 16, 72), (4100, 16, 72)],
)
def test_as_near_as_torch(patches: int, heads: int, dim: int) -> None:
    torch.manual_seed(patches)
    packed = torch.randn(3, patches, heads, dim, device="cuda").half()
    truth = scaled_dot_product_attention(*packed.double().transpose(1, 2)).transpose(0, 1).flatten(1)
    torchs = scaled_dot_product_attention(*packed.transpose(1, 2)[:, None])[0].transpose(0, 1).flatten(1)
    bound = 1.1 * float((torchs.double() - truth).norm())
    for _ in range(3):  # a race would show now and then
        assert float((attention(packed).double() - truth).norm()) <= bound
