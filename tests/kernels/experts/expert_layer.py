"""A layer of experts with random weights, and its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.experts.reference import experts
from moeserve.kernels.quantize.reference import round_trip
from moeserve.kernels.routing.reference import route
from tests.kernels.operations import load, run_experts
from tests.kernels.weights import Weights, random_weights

# in, out and the number of experts all differ: [E, out, in] read in another order cannot pass.
HIDDEN, FF, EXPERTS, TOP_K = 256, 512, 5, 2


@dataclass(frozen=True)
class Layer:
    gate: Weights  # [E, ff, hidden]
    up: Weights
    down: Weights  # [E, hidden, ff]

    @classmethod
    def random(
        cls, gate: Type, up: Type, down: Type, hidden: int = HIDDEN, ff: int = FF, num: int = EXPERTS
    ) -> Layer:
        return cls(
            random_weights(gate, num, ff, hidden, seed=1, centred=True),
            random_weights(up, num, ff, hidden, seed=2, centred=True),
            random_weights(down, num, hidden, ff, seed=3, centred=True),
        )

    def run(self, stream: CpuStream, y: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        matrices = (self.gate.pack(stream), self.up.pack(stream), self.down.pack(stream))
        return run_experts(stream, load(y), matrices, ids, weights, **options)

    def expected(
        self, y: Tensor, ids: Tensor, weights: Tensor, *, truth: bool = False, **options: Any
    ) -> Tensor:
        """The truth, or what the kernels compute of int8 activations where a matrix takes them."""
        gate, up, down = (
            round_trip if w.integer and not truth else Tensor.double for w in (self.gate, self.up, self.down)
        )
        values = self.gate.values(), self.up.values(), self.down.values()
        return experts(y, *values, ids, weights, gate, up, down, **options)


def routing(n: int, num: int = EXPERTS, top_k: int = TOP_K, seed: int = 0) -> tuple[Tensor, Tensor]:
    logits = torch.randn(n, num, generator=torch.Generator().manual_seed(seed))
    ids, weights = route(logits, top_k)
    return ids, weights.float()


# Rounding alone (measured 5e-14), but for the intermediate value that it tips to the next int8 code (2e-8).
COMPUTED = 1e-7
