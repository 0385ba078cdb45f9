"""The hand-off in CUDA graphs: replays with other data, a hang that ends."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.handoff import ExpertHandoff, HandoffError
from tests.kernels.experts.handoff_world import HIDDEN, MAX_TOKENS, TOP_K, Layer, rows
from tests.kernels.weights import nmse

LAYERS = 5


class Captured:
    """Steps of n rows through all layers as one graph."""

    def __init__(self, h: ExpertHandoff, n: int) -> None:
        self.h = h
        self.x = torch.zeros(LAYERS, n, HIDDEN, device="cuda")
        self.ids = torch.full((LAYERS, n, TOP_K), -1, dtype=torch.int32, device="cuda")
        self.weights = torch.zeros(LAYERS, n, TOP_K, device="cuda")
        self.out = torch.empty(LAYERS, n, HIDDEN, device="cuda")
        h.begin()
        self.launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()

    def launch(self) -> None:
        for i in range(LAYERS):
            self.h.publish(i, self.x[i], self.ids[i], self.weights[i])
            self.h.collect(i, self.out[i])

    def fill(self, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        batches = [rows(self.x.shape[1], seed=seed * LAYERS + i) for i in range(LAYERS)]
        for i, (x, ids, weights) in enumerate(batches):
            self.x[i], self.ids[i], self.weights[i] = x.cuda(), ids.cuda(), weights.cuda()
        return batches


def test_replays() -> None:
    stream = CpuStream(4)
    layers = [Layer.random(stream, seed=10 * i) for i in range(LAYERS)]
    h = ExpertHandoff(stream, [layer.experts for layer in layers], MAX_TOKENS, HIDDEN, TOP_K)
    steps = {n: Captured(h, n) for n in (1, 3, MAX_TOKENS)}
    for seed in range(30):
        for step in steps.values():
            batches = step.fill(seed)
            step.out.fill_(float("nan"))
            h.begin()
            step.graph.replay()
            torch.cuda.synchronize()
            h.check()
            for layer, batch, out in zip(layers, batches, step.out, strict=True):
                expected = layer.expected(*batch)
                assert nmse(out.cpu() + 1e-9, expected + 1e-9) <= 3e-4
    many = steps[1]
    for _ in range(100):  # queued ahead
        h.begin()
        many.graph.replay()
    torch.cuda.synchronize()
    h.check()
    h.close()


def test_a_hang_ends() -> None:
    """A graph launched without begin() waits for a pool that knows of nothing; the watchdog lets it go."""
    stream = CpuStream(2)
    layers = [Layer.random(stream, seed=10 * i) for i in range(LAYERS)]
    first = ExpertHandoff(stream, [layer.experts for layer in layers], MAX_TOKENS, HIDDEN, TOP_K)
    Captured(first, 2)  # compiles, for which the watchdog below would not wait
    first.close()
    h = ExpertHandoff(
        stream,
        [layer.experts for layer in layers],
        MAX_TOKENS,
        HIDDEN,
        TOP_K,
        timeout_s=0.5,
    )
    step = Captured(h, 2)
    step.fill(0)
    step.graph.replay()
    step.graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(HandoffError, match=r"without begin\(\)"):
        h.check()
    h.close()
