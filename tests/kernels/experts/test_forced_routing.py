"""A trace in place of the routers: the kernel that chooses then chooses the trace's experts."""

from __future__ import annotations

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
import numpy as np
import torch

from moeserve.kernels.routing.op import route
from moeserve.models.blocks.gpu.forced_routing import ForcedRouting
from moeserve.placement.expert_cache.generate import UNIFORM, generate


def test_the_trace_chooses() -> None:
    """Two rows of three; in a larger step the routers choose."""
    trace = generate(UNIFORM, "uniform", tokens=8, layers=2, experts=6, top_k=3)
    forced = ForcedRouting(2, 6, 2, torch.device(DEVICE))
    steps = trace.ids.reshape(4, 2, 2, 3)
    forced.load(steps)
    count = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    for step in range(4):
        forced.choose(step)
        for layer in range(2):
            logits = forced.logits(layer, torch.randn(2, 6, device=DEVICE))
            ids = torch.empty(2, 3, dtype=torch.int32, device=DEVICE)
            weights = torch.empty(2, 3, device=DEVICE)
            route(logits, None, count, ids, None, weights, None)
            assert np.array_equal(np.sort(ids.cpu().numpy()), np.sort(steps[step, :, layer]))
            assert torch.allclose(weights.cpu(), torch.tensor(1 / 3))
    logits = torch.randn(4, 6, device=DEVICE)
    assert forced.logits(0, logits) is logits
