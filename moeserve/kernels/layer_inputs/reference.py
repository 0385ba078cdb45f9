"""The specification of per-layer embeddings (Gemma 3n, https://ai.google.dev/gemma/docs/gemma-3n): an input of each
layer for each token."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import gelu

from moeserve.kernels.norm.reference import norm


def make_inputs(embedded: Tensor, projected: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the inputs of all layers, float64 [n, layers * width]: (embedded + norm(projected)) / sqrt(2), with a
    norm of each layer's part. embedded, projected [n, layers * width]; weight [width]. eps: added to the mean square
    under the norm's root."""
    parts = norm(projected.view(len(projected), -1, len(weight)), weight, eps)
    return (embedded.double() + parts.flatten(1)) * math.sqrt(0.5)


def gate_input(gate: Tensor, inputs: Tensor) -> Tensor:
    """Returns gelu(gate) * inputs, float64, with GELU's tanh form. Both [n, width]."""
    activated: Tensor = gelu(gate.double(), approximate="tanh")
    return activated * inputs.double()
