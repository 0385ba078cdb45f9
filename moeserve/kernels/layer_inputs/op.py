"""Launches the operations of per-layer embeddings."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.layer_inputs.triton import gate_input_kernel, make_inputs_kernel


def make_inputs(inputs: Tensor, projected: Tensor, weight: Tensor, eps: float, count: Tensor) -> None:
    """Computes inputs[i] = (inputs[i] + norm(projected[i])) / sqrt(2) for i < count[0], with a norm of each layer's
    part. inputs float32, projected floats: [n, layers * width], contiguous; weight float32 [width]. eps: added to the
    mean square under the norm's root."""
    n, width = len(inputs), len(weight)
    layers = inputs.shape[1] // width
    make_inputs_kernel(
        (n, layers), inputs, projected, weight, count, layers, width, eps, next_power_of_2(width), pdl(),
        num_warps=1, launch_pdl=pdl(),
    )  # fmt: skip


def gate_input(gate: Tensor, inputs: Tensor, count: Tensor, out: GpuActivations) -> None:
    """Computes out[i] = gelu(gate[i]) * inputs[i] for i < count[0]. gate: floats [n, width], contiguous; inputs
    float32 [n, width], rows at any stride."""
    n, width = gate.shape
    gate_input_kernel(
        (n,), gate, inputs, count, out.x, out.codes, out.scales, inputs.stride(0), width, next_power_of_2(width),
        pdl(), num_warps=1, launch_pdl=pdl(),
    )  # fmt: skip
