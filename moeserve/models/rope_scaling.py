"""RoPE scaling, a part of `ModelShape` (interface.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Describes how RoPE's frequencies are stretched beyond the training context.

    "yarn" as in https://arxiv.org/abs/2309.00071; the other fields mean nothing for "none", and only
    `factor` does for "linear", `original_context_length` and `attn_factor` for "longrope"."""

    type: Literal["none", "linear", "yarn", "longrope"] = "none"
    factor: float = 1.0  # >= 1: extended / original context length
    original_context_length: int = 0  # tokens
    # Multiplies cos and sin; of yarn beside its own attention scale, 0.1 ln(factor) + 1.
    attn_factor: float = 1.0
    beta_fast: float = 32.0  # rotations within the original context above which a frequency is left alone
    beta_slow: float = 1.0  # number of rotations below which a frequency is interpolated fully
    truncate: bool = True  # the interpolation ramp starts and ends at whole dimensions
