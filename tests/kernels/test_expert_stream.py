"""Experts in RAM on their way to the GPU: all of a layer or the first of them, layer after layer."""

from __future__ import annotations

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.planes import dequantize
from moeserve.models.qwen3moe.expert_stream import ExpertStream
from tests.kernels.handoff_world import EXPERTS, HERE, Q8, Layer

FLOATS = (Type.BF16, Type.BF16, Type.F32)  # which the interpreter has soon unpacked


def test_each_expert_is_streamed_or_left() -> None:
    """Steps of other counts one after another. Layer 1 has no experts in RAM."""
    stream = CpuStream(1)
    layers = [
        Layer.random(stream, Q8, 0),
        None,
        Layer.random(stream, FLOATS, 10),
        Layer.random(stream, FLOATS, 20),
    ]
    experts = ExpertStream(
        [None if layer is None else layer.experts for layer in layers], torch.device(DEVICE)
    )
    for step in [(0, 0, 4, 4), (1, 0, 3, 2), (0, 0, 0, 0), (0, 0, 0, 1)]:
        experts.begin(step)
        for index, (layer, count) in enumerate(zip(layers, step, strict=True)):
            if layer is None:
                continue
            place = [HERE.index(e) if e in HERE else -1 for e in range(EXPERTS)]
            assert experts.left(index).tolist() == [p if p >= count else -1 for p in place]
            if not count:
                continue
            found = experts.take(index)
            for planes, weights in zip((found.gate, found.up, found.down), layer.weights, strict=True):
                for e in range(count):
                    assert torch.equal(dequantize(planes, e).cpu(), weights.values()[e])
            assert experts.places(index).tolist() == [p if p < count else -1 for p in place]
