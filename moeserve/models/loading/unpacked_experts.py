"""Keeps a second copy of layers' experts, unpacked to 16-bit floats, so that large steps need not unpack the experts
each time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from moeserve.kernels.experts.large_batch import unpack_gate_up
from moeserve.kernels.linear.large_batch import unpack
from moeserve.kernels.linear.operands import Weight, weight_of
from moeserve.kernels.planes import Planes
from moeserve.models.loading.gpu_weights import GpuExperts, GpuLayer, GpuMoe, GpuWeights, plane_tensors


def with_unpacked_experts(
    weights: GpuWeights, layers: Collection[int], floats: torch.dtype, *, first: int = 0
) -> GpuWeights:
    """Returns the weights with the routed experts of `layers` unpacked to `floats`, in addition to their planes.
    layers: indices of the model's layers, all of whose experts are in `weights`. first: index of the model's layer with
    which `weights` begins."""
    unpacked = [
        _with_unpacked(layer, floats) if first + index in layers else layer
        for index, layer in enumerate(weights.layers)
    ]
    return replace(weights, layers=unpacked)


def _with_unpacked(layer: GpuLayer, floats: torch.dtype) -> GpuLayer:
    moe = layer.ffn
    assert isinstance(moe, GpuMoe)
    assert moe.experts is not None
    return replace(layer, ffn=replace(moe, experts=unpack_experts(moe.experts, floats)))


def unpack_experts(experts: GpuExperts, floats: torch.dtype) -> GpuExperts:
    """Returns the experts with their matrices in `floats` beside the planes."""
    gate, up, down = experts.gate, experts.up, experts.down
    both = torch.empty(up.experts, 2 * up.rows, up.cols, dtype=floats, device=up.codes.device)
    unpack_gate_up(_weight(gate), _weight(up), both)
    of_down = torch.empty(down.experts, down.rows, down.cols, dtype=floats, device=up.codes.device)
    unpack(_weight(down), of_down)
    return replace(experts, unpacked=(both, of_down))


def _weight(planes: Planes) -> Weight:
    return weight_of(plane_tensors(planes), int(planes.type), planes.cols)
