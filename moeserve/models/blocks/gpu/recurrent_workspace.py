"""The buffers of recurrent layers in a step on the GPU: views of the step's arena."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.models.blocks.gpu.arena_views import activations
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import GatedDeltaNetShape


class GateProducts(NamedTuple):
    """Buffers of the second products of Kimi Delta Attention's decays and output gates."""

    low_rank: GpuActivations  # low-rank input of a, then of z
    a: Tensor  # [rows, decays]
    z: Tensor | None  # [rows, value_width]; None: z has one product


class KimiDeltaWorkspace(NamedTuple):
    """Additional buffers of Kimi Delta Attention."""

    qkv: Tensor  # [rows, channels]
    second: GateProducts | None  # None: a and z have one product each


class DeltaWorkspace:
    """Additional buffers of recurrent layers."""

    def __init__(self, views: dict[str, Tensor], shape: GatedDeltaNetShape) -> None:
        self.mixed = views["delta_mixed"]
        # Of steps that process prompts in chunks; the second only in Kimi Delta Attention.
        self.inverse, self.scores = views.get("delta_inverse"), views.get("delta_scores")
        self.kimi = None
        if shape.heads.is_kimi:
            second = None
            if shape.gate_rank:
                second = GateProducts(
                    activations(views, "delta_low_rank"), views["delta_a"], views.get("delta_z")
                )
            self.kimi = KimiDeltaWorkspace(views["delta_qkv"], second)
        self.out = activations(views, "attended", shape.heads.value_width)


class Mamba2Workspace:
    """Additional buffers of Mamba-2 layers."""

    def __init__(self, views: dict[str, Tensor], shape: Mamba2Shape) -> None:
        self.mixed = views["mamba2_mixed"]
        self.out = activations(views, "attended", shape.heads.value_width)
