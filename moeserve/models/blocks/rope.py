"""Angles of rotary position embeddings (RoPE, https://arxiv.org/abs/2104.09864), with linear, YaRN and
LongRoPE scaling."""

from __future__ import annotations

import math

import torch

from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.rope_scaling import RopeScaling

_POSITIONS = 1 << 14  # positions computed at once


def rope_tables(
    config: ModelShape, length: int, form: AttentionForm | None = None, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin of every position's angles, float32 [length, rotary_dim / 2] each, times the magnitude of
    YaRN or LongRoPE; 1 and 0 for a form without positions.

    form: the attention form; None: the model's only one. factors: [1, head_dim / 2], divide the frequencies of forms
    with `has_rope_factors`; the first rotary_dim / 2 are used. LongRoPE's are [2, rotary_dim / 2]: the second row is
    used if `length` exceeds the original context. The tables take no more memory than one layer of a
    KV cache of `length` tokens. Angles are computed in float64 by blocks of positions, because all at once would
    take four times that.
    """
    form = form or config.heads.form
    scaling = config.rope_scaling if form.rope_scaled else RopeScaling()
    half = form.rotary_dim // 2
    if not form.has_positions:
        return torch.ones(length, half), torch.zeros(length, half)
    inverse = (form.rope_theta or config.rope_theta) ** (-torch.arange(half, dtype=torch.float64) / half)
    if form.has_rope_factors:
        assert factors is not None
        is_long = scaling.type == "longrope" and length > scaling.original_context_length
        inverse = inverse / factors[int(is_long), :half].double()
    magnitude = 1.0
    if scaling.type == "linear":
        inverse = inverse / scaling.factor
    elif scaling.type == "yarn":
        inverse = _yarn(inverse, scaling, form.rotary_dim, form.rope_theta or config.rope_theta)
        magnitude = scaling.attn_factor * (1.0 + 0.1 * math.log(scaling.factor))
    elif scaling.type == "longrope":
        magnitude = scaling.attn_factor
    cos, sin = torch.empty(length, half), torch.empty(length, half)
    for start in range(0, length, _POSITIONS):
        part = slice(start, start + _POSITIONS)
        angles = torch.arange(start, min(start + _POSITIONS, length), dtype=torch.float64)[:, None] * inverse
        cos[part], sin[part] = angles.cos() * magnitude, angles.sin() * magnitude
    return cos, sin


def section_of_frequencies(config: ModelShape, half: int) -> torch.Tensor:
    """Returns int64 [half]: for each frequency, which of a row's three M-RoPE positions (0 to 2) it rotates by."""
    assert config.rope_sections is not None
    if config.sections_in_blocks:
        return torch.arange(3).repeat_interleave(torch.tensor(config.rope_sections))
    sections = torch.zeros(half, dtype=torch.int64)
    for section in (1, 2):  # the remaining frequencies rotate by position 0, time
        sections[section : 3 * config.rope_sections[section] : 3] = section
    return sections


def _yarn(inverse: torch.Tensor, scaling: RopeScaling, rotary_dim: int, rope_theta: float) -> torch.Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): keeps frequencies that make many turns within the
    original context, interpolates slow ones, and blends the two along a ramp in between."""

    def dimension(rotations: float) -> float:  # the dimension whose frequency makes this number of turns
        turns = scaling.original_context_length / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(rope_theta))

    half = rotary_dim // 2
    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)
