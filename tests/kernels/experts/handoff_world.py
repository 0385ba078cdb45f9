"""Layers with some of their experts on the CPU, and a hand-off whose GPU is the test: it writes rows, raises flags."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.handoff import CpuExperts, ExpertHandoff
from moeserve.kernels.handoff.reference import handoff as reference
from moeserve.kernels.quantize.reference import quantize
from tests.kernels.operations import load, run_experts
from tests.kernels.weights import Weights, activations, random_weights

# No two alike, none a power of two.
HIDDEN, FF, EXPERTS, TOP_K, MAX_TOKENS = 96, 160, 7, 3, 12
HERE = [5, 0, 3, 6]  # experts on the CPU, in the order of their places there
Q8 = (Type.Q8_0, Type.Q8_0, Type.Q8_0)


@dataclass(frozen=True)
class Layer:
    experts: CpuExperts
    weights: tuple[Weights, Weights, Weights]  # what is packed

    @classmethod
    def random(cls, stream: CpuStream, kinds: tuple[Type, Type, Type] = Q8, seed: int = 0) -> Layer:
        shapes = ((FF, HIDDEN), (FF, HIDDEN), (HIDDEN, FF))
        weights = tuple(
            random_weights(kind, len(HERE), *shape, seed=seed + i)
            for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        )
        gate, up, down = weights
        local = torch.full((EXPERTS,), -1, dtype=torch.int32)
        local[HERE] = torch.arange(len(HERE), dtype=torch.int32)
        packed = (w.pack(stream) for w in weights)
        return cls(CpuExperts(*packed, local.to(DEVICE)), (gate, up, down))

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        values = (w.values() for w in self.weights)
        return reference(x, ids, weights, self.experts.expert_map.cpu(), *values)


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, ids of all the layer's experts and weights of n rows."""
    scores = torch.rand(n, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights, ids = scores.topk(TOP_K)
    return activations("gaussian", n, HIDDEN, seed), ids.int(), weights


def local_routes(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Places of experts on the CPU, a third of them none, and weights."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(len(HERE), generator=g)[:TOP_K] for _ in range(n)]).int()
    return ids.masked_fill(torch.rand(n, TOP_K, generator=g) < 1 / 3, -1), torch.rand(n, TOP_K, generator=g)


class HandGpu:
    """The GPU's side of a hand-off, by hand."""

    def __init__(self, handoff: ExpertHandoff) -> None:
        self.region = handoff._region

    def publish(
        self,
        layer: int,
        step: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
    ) -> None:
        n, slot = len(x), self.region.slots[layer % 2]
        if slot.q8 is not None:
            slot.q8[:n] = quantize(x).rows()
        if slot.f32 is not None:
            slot.f32[:n] = x
        slot.ids[:n], slot.weights[:n] = ids, weights
        self.raise_flag(layer, step, n if (ids >= 0).any() else 0)

    def raise_flag(self, layer: int, step: int, rows: int) -> None:
        self.region.answers[layer, 0] = 0
        self.region.requests[layer, 0] = rows << 32 | step

    def wait(self, layer: int, patience: float = 60.0) -> None:
        deadline = time.monotonic() + patience
        while self.region.answers[layer, 0] == 0:
            assert time.monotonic() < deadline, f"no answer of layer {layer}"
            time.sleep(0.0002)

    def result(self, layer: int, n: int) -> Tensor:
        return self.region.slots[layer % 2].result[:n]


def alone(stream: CpuStream, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What the pool computes of these routes when they are an operation like any other. -1: none."""
    there = ids >= 0
    padded = torch.where(there, ids, torch.tensor(0, dtype=torch.int32))
    return run_experts(stream, load(x), layer.experts.matrices, padded, weights * there)
