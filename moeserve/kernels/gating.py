"""The activations that join gate and up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# silu: silu(gate) * up. clamped_silu: the same, but a limit clamps the gate, not its SiLU. gelu: gelu(gate) * up, by
# its tanh form. swiglu_oai, situ: gpt-oss's and Kimi-K3's, see `reference.activate`. relu: relu(gate) * up; of experts
# without a gate, whose gate is up itself, the square of ReLU.
Activation = Literal["silu", "clamped_silu", "swiglu_oai", "gelu", "relu", "situ"]

OAI_LIMIT = 7.0  # default of gpt-oss
OAI_ALPHA = 1.702


@dataclass(frozen=True, slots=True)
class GatedForm:
    """An activation as numbers, which are compile-time constants of Triton kernels."""

    activation: Activation
    limit: float  # 0: none
    alpha: float  # 0: not used


def form_of(activation: Activation, limit: float | None = None, alpha: float = OAI_ALPHA) -> GatedForm:
    """Returns the activation's constants. limit: see `limit_of`."""
    return GatedForm(
        activation, limit_of(activation, limit), alpha if activation in ("swiglu_oai", "situ") else 0.0
    )


def limit_of(activation: Activation, limit: float | None) -> float:
    """Returns the clamp limit of gate and up; 0: no limit. limit: None: the activation's default."""
    if limit is None:
        return OAI_LIMIT if activation == "swiglu_oai" else 0.0
    return limit
