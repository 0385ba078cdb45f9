"""What layers with inputs of their own launch, of Gemma 4 E2B's sizes, and layers that attend to another's keys."""

from __future__ import annotations

import torch

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.embed.op import embed
from moeserve.kernels.layer_inputs.op import gate_input, make_inputs
from moeserve.kernels.rope.op import rope_store
from moeserve.quantization.table import Q8_0
from tests.support.measuring.gpu_operators.tensors import both, empty, i32, weight

LAYERS, WIDTH = 35, 256


def layer_inputs(n: int, kind: torch.dtype) -> None:
    count, at = empty(1, dtype=i32), empty(n, dtype=i32)
    inputs, projected = empty(n, LAYERS * WIDTH), empty(n, LAYERS * WIDTH, dtype=kind)
    embed(at, count, weight(Q8_0, 9, LAYERS * WIDTH), int(Q8_0), inputs, scale=16.0, fills=True)
    make_inputs(inputs, projected, empty(WIDTH), 1e-3, count)
    few = n <= 8
    out = GpuActivations(*both(n, WIDTH)) if few else GpuActivations(empty(n, WIDTH, dtype=kind), None, None)
    gate_input(empty(n, WIDTH, dtype=kind), inputs[:, WIDTH : 2 * WIDTH], count, out)
    heads, dim = 8, 512
    angles, pool = empty(9, dim // 2), empty(50, 1, dim, dtype=torch.float16)
    rope_store(
        empty(n, heads * dim, dtype=kind), None, None, empty(dim), None, 1e-6, angles, angles, at, at, count,
        empty(n, heads, dim, dtype=torch.float16), pool, pool,
    )  # fmt: skip
