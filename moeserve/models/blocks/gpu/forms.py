"""The tables and plans that layers with one form of attention share on a GPU, for every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.models.blocks.rope import rope_tables
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm


@dataclass(frozen=True, slots=True)
class GpuForm:
    index: int  # among the model's forms
    cos: Tensor  # float32 [positions, rotary_dim / 2], as is sin: the angles of all positions
    sin: Tensor


def forms_of(
    model: ModelShape, length: int, device: torch.device, rope_factors: Tensor | None
) -> dict[AttentionForm, GpuForm]:
    """length: positions. rope_factors: on the CPU, see `rope_tables`."""
    forms: dict[AttentionForm, GpuForm] = {}
    for index, form in enumerate(model.forms):
        cos, sin = (table.to(device) for table in rope_tables(model, length, form, rope_factors))
        forms[form] = GpuForm(index, cos, sin)
    return forms
