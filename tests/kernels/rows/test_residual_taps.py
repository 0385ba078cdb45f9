"""The residual stream that an EAGLE-3 head reads: a column for each layer that it names."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.blocks.gpu.taps import ResidualTaps


def test_a_layer_may_be_read_twice() -> None:
    """Default layers of a small model, and a file's, may repeat: the head has a column for each."""
    taps = ResidualTaps(
        [1, 1, 3], num_layers=4, rows=2, hidden=8, floats=torch.float32, device=torch.device(DEVICE)
    )
    for layer in range(4):
        taps.copy(layer, torch.full((2, 8), layer + 1.0, device=DEVICE))
    assert taps.rows.view(2, 3, 8)[..., 0].tolist() == [[2.0, 2.0, 4.0]] * 2
