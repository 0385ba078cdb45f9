"""RoPE's angles (https://arxiv.org/abs/2104.09864), with linear and YaRN stretching."""

from __future__ import annotations

import math

import torch

from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.rope_scaling import RopeScaling

_POSITIONS = 1 << 14  # computed at a time


def rope_tables(
    config: ModelShape, length: int, form: AttentionForm | None = None, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position's angles: float32 [length, rotary_dim / 2] each, YaRN's magnitude included.

    form: the model's only one, if it is left out. factors [head_dim / 2]: divide the frequencies of a form that has
    them, as far as it rotates. The two take no more than a layer of a KV pool with as many tokens; the angles in
    float64 would be four times that.
    """
    form = form or config.heads.form
    scaling = config.rope_scaling if form.rope_scaled else RopeScaling()
    half = form.rotary_dim // 2
    if not form.has_positions:
        return torch.ones(length, half), torch.zeros(length, half)
    inverse = (form.rope_theta or config.rope_theta) ** (-torch.arange(half, dtype=torch.float64) / half)
    if form.has_rope_factors:
        assert factors is not None
        inverse = inverse / factors[:half].double()
    magnitude = 1.0
    if scaling.type == "linear":
        inverse = inverse / scaling.factor
    elif scaling.type == "yarn":
        inverse = _yarn(inverse, scaling, form.rotary_dim, form.rope_theta or config.rope_theta)
        magnitude = scaling.attn_factor * (1.0 + 0.1 * math.log(scaling.factor))
    cos, sin = torch.empty(length, half), torch.empty(length, half)
    for start in range(0, length, _POSITIONS):
        part = slice(start, start + _POSITIONS)
        angles = torch.arange(start, min(start + _POSITIONS, length), dtype=torch.float64)[:, None] * inverse
        cos[part], sin[part] = angles.cos() * magnitude, angles.sin() * magnitude
    return cos, sin


def section_of_frequencies(config: ModelShape, half: int) -> torch.Tensor:
    """By which of a row's three positions each of `half` frequencies turns: int64 [half], 0 to 2."""
    assert config.rope_sections is not None
    sections = torch.zeros(half, dtype=torch.int64)
    for section in (1, 2):  # what the others leave turns by time
        sections[section : 3 * config.rope_sections[section] : 3] = section
    return sections


def _yarn(inverse: torch.Tensor, scaling: RopeScaling, rotary_dim: int, rope_theta: float) -> torch.Tensor:
    """Frequencies that turn often within the original context stay, slow ones are interpolated, a ramp between
    (https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:  # where a frequency makes this number of turns
        turns = scaling.original_context_length / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(rope_theta))

    half = rotary_dim // 2
    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)
