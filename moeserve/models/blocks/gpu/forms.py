"""RoPE tables that all layers with the same attention form share on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.rope.op import SectionPositions
from moeserve.models.blocks.rope import rope_tables
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm


@dataclass(frozen=True, slots=True)
class GpuForm:
    index: int  # number of this form among the model's
    cos: Tensor  # float32 [positions, rotary_dim / 2], as is sin: of all positions' angles
    sin: Tensor
    # height, width and time of `SectionPositions`, where rows rotate by three positions; None: by one.
    sections: tuple[int, int, int] | None

    def sections_of(self, rotary_positions: Tensor | None) -> SectionPositions | None:
        """Returns the positions by which rows rotate, from three positions each, int32 [n, 3]; None in a model whose
        rows have one position."""
        if self.sections is None:
            return None
        assert rotary_positions is not None
        return SectionPositions(rotary_positions, *self.sections)


def forms_of(
    model: ModelShape, length: int, device: torch.device, rope_factors: Tensor | None
) -> dict[AttentionForm, GpuForm]:
    """Returns RoPE's tables of cosines and sines of each attention form, on the device. length: number of positions;
    rope_factors: float32, on the CPU, divisors of the rotary frequencies, see `rope_tables`."""
    forms: dict[AttentionForm, GpuForm] = {}
    sections = None
    if model.rope_sections is not None:
        time, height, width = model.rope_sections
        sections = height, width, time if model.sections_in_blocks else 0
    for index, form in enumerate(model.forms):
        cos, sin = (table.to(device) for table in rope_tables(model, length, form, rope_factors))
        forms[form] = GpuForm(index, cos, sin, sections)
    return forms
