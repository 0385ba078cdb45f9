"""The activation of gate and up. Code without torch may hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# silu: silu(gate) * up. gelu: gelu(gate) * up, by its tanh form. swiglu_oai: gpt-oss's, see `reference.activate`.
Activation = Literal["silu", "swiglu_oai", "gelu"]

OAI_LIMIT = 7.0  # what gpt-oss has where its files say nothing
OAI_ALPHA = 1.702


@dataclass(frozen=True, slots=True)
class GatedForm:
    """The activation as numbers, which Triton's kernels are compiled for."""

    activation: Activation
    limit: float  # 0: none
    alpha: float  # 0: not used


def form_of(activation: Activation, limit: float | None = None, alpha: float = OAI_ALPHA) -> GatedForm:
    """limit: see `limit_of`."""
    return GatedForm(activation, limit_of(activation, limit), alpha if activation == "swiglu_oai" else 0.0)


def limit_of(activation: Activation, limit: float | None) -> float:
    """Where gates and ups are cut; 0: nowhere. limit: None for what the activation usually has."""
    if limit is None:
        return OAI_LIMIT if activation == "swiglu_oai" else 0.0
    return limit
