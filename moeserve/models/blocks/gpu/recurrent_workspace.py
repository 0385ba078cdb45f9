"""The buffers of recurrent layers in a step on the GPU: views of the step's arena."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.models.blocks.gpu.arena_views import activations
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import GatedDeltaNetShape


class GateProducts(NamedTuple):
    """Buffers of the second matrix products with which Kimi Delta Attention makes its decays (a) and output gates
    (z)."""

    low_rank: GpuActivations  # low-rank input of a, then of z
    a: Tensor  # [rows, decays]
    z: Tensor | None  # [rows, value_width]; None: z has one product


class KimiDeltaWorkspace(NamedTuple):
    """The buffers that Kimi Delta Attention needs in addition to those of a gated delta net."""

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
